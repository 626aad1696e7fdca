"""Trials of ranks whose settings differ, or that open different stores under one URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

import deltachain
from deltachain.errors import ConfigError, DeltaChainError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from tests.ranks.layouts import LAYOUTS, set_up, train_step
from tests.ranks.quantised_trials import Layers, shard_, step_
from tests.support.faults import FaultyStore

DEADLINE_S = 60.0


def refuses(
    rank: int, url: str, settings: Sequence[Mapping[str, Any]], said: Sequence[str]
) -> None:
    model = Layers()
    shard_(model, 0)
    config = PublishConfig(
        **{"url": url, "dtype": "BF16", "deadline_s": DEADLINE_S, **settings[rank]}
    )
    with pytest.raises(ConfigError, match="the ranks have different settings") as caught:
        Publisher(config).attach(model)
    for text in said:
        assert text in str(caught.value), str(caught.value)
    assert "every rank" in caught.value.hint


def refuses_steps(rank: int, url: str) -> None:
    model, optimizer = set_up("rows")
    with pytest.raises(ConfigError, match="every_steps is 1 on rank 0, 2 on rank 1"):
        deltachain.attach(model, optimizer, url=url, every_steps=rank + 1, dtype="BF16")


def publishes(rank: int, url: str, quantization: str | None) -> None:
    del rank
    model = Layers()
    shard_(model, 0)
    config = PublishConfig(url=url, dtype="BF16", quantization=quantization, deadline_s=DEADLINE_S)
    with Publisher(config).attach(model) as publisher:
        step_(model, 1)
        publisher.publish(step=1).result(DEADLINE_S)


def publishes_with(rank: int, url: str, settings: Sequence[Mapping[str, Any]]) -> None:
    model, optimizer = set_up("rows")
    config = PublishConfig(url=url, dtype="BF16", deadline_s=DEADLINE_S, **settings[rank])
    with Publisher(config).attach(model) as publisher:
        for number in range(3):
            train_step("rows", model, optimizer, number)
            assert publisher.publish(step=number).result(DEADLINE_S).version == number + 1


class StoreOfAnotherHost(FaultyStore):
    shown = ""

    @property
    @override
    def url(self) -> str:
        return self.shown


def opens_another_store(rank: int, folder: str, message: str) -> None:
    store = StoreOfAnotherHost(open_store(Path(folder) / str(rank), writer=True))
    store.shown = (Path(folder) / "0").as_uri()
    config = PublishConfig(url=store.shown, dtype="BF16", deadline_s=DEADLINE_S)
    with pytest.raises(DeltaChainError, match=message) as caught:
        Publisher(config, store=store).attach(LAYOUTS["rows"]())
    assert "same store" in caught.value.hint
