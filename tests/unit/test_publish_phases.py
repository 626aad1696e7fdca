"""Phases in manifests: what a publisher writes, and what readers believe."""

from typing import Any

import pytest

from deltachain.chain.chain import Chain
from deltachain.format.documents import phases_mark, phases_of
from deltachain.publish import Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from tests.support.models import TinyModel, tensors_of, train_
from tests.support.values import present
from tests.unit.manifest_chains import manifest_after

PHASES = ["diff", "encode", "upload", "look", "fetch", "stage", "pause", "swap"]


def test_phases_go_from_the_diff_to_the_swap() -> None:
    store, model = MemoryStore(), TinyModel()
    with Publisher(store.url, store=store).attach(model) as publisher:
        train_(model, 1)
        receipt = publisher.publish(step=1)
        publisher.flush()
        applied = present(Subscriber(store.url, tensors_of(model), store=store).update())
    published = receipt.result()
    assert list(applied.phases) == PHASES
    for name in ("diff", "encode", "upload"):
        assert applied.phases[name] == pytest.approx(published.phases[name], abs=0.0006)
    head = present(Chain.open(store).head())
    assert phases_of(head.manifest) == applied.publish_phases


@pytest.mark.parametrize(
    "given",
    [
        *(None, [], "x", {"diff": "1"}, {"diff": True}, {"diff": -1}, {"diff": 1e300}),
        *({"diff": None, "other": 1.0}, {"diff": {"deep": 1}}),
    ],
)
def test_what_is_no_time_is_left_out(given: Any) -> None:
    forged = manifest_after(None, ext={"deltachain.phases": given})
    assert phases_of(forged) == {}


def test_a_mark_has_milliseconds_and_known_phases_alone() -> None:
    mark = phases_mark({"diff": 0.0123456, "upload": 2.0, "commit": 1.0})
    assert mark == {"deltachain.phases": {"diff": 0.012, "upload": 2.0}}
