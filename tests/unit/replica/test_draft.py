"""A draft that follows a chain of its own, in the pauses of the model that it drafts for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltachain import errors
from deltachain.replica.layout.heads import DraftOnly
from deltachain.replica.leader import Leader
from deltachain.replica.rank import NO_DRAFT
from deltachain.store import open_store
from tests.support.engine import Sharding
from tests.support.values import present
from tests.unit.replica.replicas import Followed, led

ONE_PAUSE = ["pause", "write", "name 1", "resume"]


@contextmanager
def drafting(folder: Path) -> Iterator[tuple[Followed, Followed]]:
    """A model and its draft, each with a chain."""
    here = Followed(Sharding(tp=2), folder / "model")
    named = open_store(f"memory://{folder.name}")  # which others open by its name
    draft = Followed(Sharding(tp=2), folder / "draft", store=named)
    here.engine.draft = draft.engine
    try:
        yield here, draft
    finally:
        here.close()
        draft.close()


def started(leader: Leader) -> Leader:
    leader.start()
    leader.engine.events.clear()  # type: ignore[attr-defined]
    return leader


def drafts(leader: Leader) -> dict[str, Any]:
    return present(leader.status().draft)


def test_both_are_swapped_in_one_pause_and_the_draft_alone_in_its_own(tmp_path: Path) -> None:
    with drafting(tmp_path) as (here, draft), led(here, draft_url=draft.store.url) as leader:
        draft.publish(1)
        started(leader)
        assert draft.holds(1)
        draft.publish(2)
        here.publish(1)
        leader.update()
        assert here.engine.events == ONE_PAUSE
        assert draft.engine.events == ["write", "write"]
        assert here.holds(1)
        assert draft.holds(2)
        draft.publish(3)
        assert leader.update() is None
        assert here.engine.events == [*ONE_PAUSE, "pause", "resume"]
        assert draft.holds(3)
        found = drafts(leader)
        assert found == {"url": draft.store.url, "version": 3, "head": 3, "trouble": ""}


def test_a_rollback_keeps_the_draft_until_the_release(tmp_path: Path) -> None:
    with drafting(tmp_path) as (here, draft), led(here, draft_url=draft.store.url) as leader:
        started(leader)
        here.publish(1)
        draft.publish(1)
        leader.update()
        draft.publish(2)
        assert leader.rollback(0).version == 0
        assert here.holds(0)
        assert draft.holds(1)
        leader.release()
        leader.update()
        assert here.holds(1)
        assert draft.holds(2)


def test_a_draft_that_fails_keeps_its_bits_and_the_model_goes_on(tmp_path: Path) -> None:
    with drafting(tmp_path) as (here, draft), led(here, draft_url=draft.store.url) as leader:
        started(leader)
        here.publish(1)
        draft.publish(1)
        draft.engine.faults.refuses[1, "swap"] = errors.PartialApplyError("struck")
        leader.update()
        assert here.holds(1)
        assert draft.holds(0)
        assert "struck" in drafts(leader)["trouble"]
        assert leader.status().ready
        assert not here.engine.paused
        draft.engine.faults.refuses.clear()
        leader.update()
        assert draft.holds(1)
        assert drafts(leader)["trouble"] == ""


def test_a_draft_that_others_wrote_to_is_replaced_after_a_scrub(tmp_path: Path) -> None:
    with drafting(tmp_path) as (here, draft), led(here, draft_url=draft.store.url) as leader:
        draft.publish(1)
        started(leader)
        draft.scribble(0, "norm.weight")
        assert leader.scrub()
        leader.update()
        assert draft.holds(1)


def test_an_engine_without_a_draft_of_its_own_is_refused(tmp_path: Path) -> None:
    with drafting(tmp_path) as (here, draft), led(here, draft_url=draft.store.url) as leader:
        draft.engine.faults.refuses[0, "attach"] = NO_DRAFT
        with pytest.raises(errors.ConfigError, match="drafts with no model of its own"):
            leader.start()


def test_a_draft_loads_nothing_into_what_it_shares_with_the_model() -> None:
    class Part(nn.Module):
        def __init__(self, embed: nn.Embedding) -> None:
            super().__init__()
            self.embed, self.out = embed, nn.Linear(2, 2, bias=False)

        def load_weights(self, tensors: list[tuple[str, Tensor]]) -> None:
            for name, tensor in tensors:
                self.get_parameter(name).data.copy_(tensor)

    model = Part(nn.Embedding(2, 2))
    draft = Part(model.embed)
    before, ones = model.embed.weight.detach().clone(), torch.ones(2, 2)
    own = DraftOnly(draft, model)
    for one in (own, DraftOnly(draft, nn.Linear(1, 1), own)):
        one.load_weights([("embed.weight", ones), ("out.weight", ones)])
        assert model.embed.weight is draft.embed.weight
        assert torch.equal(model.embed.weight, before)
        assert torch.equal(draft.out.weight, ones)
