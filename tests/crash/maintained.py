"""Processes of a chain that is maintained while it is killed at: a publisher, and maintainers."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from deltachain.chain.chain import Chain
from deltachain.errors import DeltaChainError
from deltachain.maintain import KeepRule, Maintainer, Pruner
from deltachain.maintain.survey import Survey
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from tests.support.models import TinyModel, train_

KEPT = 24

GRACE_S = 1.5


def publish_until(
    url: str, stop: Path, environment: Mapping[str, str], printed: Path, pause_s: float
) -> None:
    _begin(environment, printed)
    model = TinyModel()
    config = PublishConfig(url=url, anchor_every=16)
    with Publisher(config, store=open_store(url, writer=True)).attach(model) as publisher:
        step = 0
        while not stop.exists():
            step += 1
            train_(model, step)
            publisher.publish(step=step)
            publisher.flush()
            time.sleep(pause_s)


def maintain_for_ever(
    url: str, environment: Mapping[str, str], printed: Path, last: int = KEPT
) -> None:
    _begin(environment, printed)
    maintainer = maintainer_of(url, last=last)
    while True:
        try:
            done = maintainer.round()
            if done is not None and done.pruned is not None and done.pruned.due:
                print(f"pruned {len(done.pruned.due)}", flush=True)  # noqa: T201 - read by the test
        except DeltaChainError as error:
            print(f"{type(error).__name__}: {error}", flush=True)  # noqa: T201 - read by the test
        time.sleep(0.05)


def maintainer_of(url: str, grace_s: float = GRACE_S, last: int = KEPT) -> Maintainer:
    chain = Chain.open(open_store(url, writer=True))
    pruner = Pruner(Survey(chain), KeepRule(last=last), grace_s=grace_s)
    return Maintainer(chain, pruner, anchor_every=64)


def _begin(environment: Mapping[str, str], printed: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with printed.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
