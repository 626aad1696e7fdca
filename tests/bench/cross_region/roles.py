"""What the processes of a run do: ``python -m tests.bench.cross_region.roles ROLE``.

Each reads orders and writes answers, JSON objects a line, and ends when its orders do. Times are of
``time.monotonic``, which all processes of a Linux machine share.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import torch

from deltachain.errors import ConfigError
from tests.bench.cross_region.delay import DelayProxy
from tests.bench.cross_region.scene import Scene
from tests.bench.cross_region.ways import receiver, sender
from tests.support.seaweed import Seaweed

Order = Mapping[str, Any]


class Replay(torch.optim.Optimizer):
    def __init__(self, scene: Scene, flat: np.ndarray[Any, np.dtype[np.uint16]]) -> None:
        super().__init__(list(scene.tensors(flat).values()), {})
        self._scene, self._flat = scene, flat
        self._version = 0
        self._next = scene.change(1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        self._flat[self._next.indices] = self._next.bits
        self._version += 1

    def prepare(self, version: int) -> None:
        self._next = self._scene.change(version)


def store(order: Order) -> None:
    with Seaweed(Path(order["folder"]), host=order["host"]) as server:
        _answer(env=server.env(), url=server.url())
        _wait_for_the_end()


def proxy(order: Order) -> None:
    parts = urlsplit(order["endpoint"])
    target = (str(parts.hostname), int(parts.port or 80))
    with DelayProxy(target, delay_s=order["delay_s"]) as delayed:
        _answer(endpoint=f"http://127.0.0.1:{delayed.port}")
        _wait_for_the_end()


def trainer(order: Order) -> None:
    scene = Scene.open(Path(order["scene"]))
    flat = scene.first()
    optimizer = Replay(scene, flat)
    with closing(sender(order["way"], scene, flat, url=order["url"])) as sending:
        sending.send(0)
        _answer(sent=0)
        for each in _orders():
            optimizer.prepare(each["step"])
            optimizer.step()
            stepped = time.monotonic()
            sending.send(each["step"])
            _answer(stepped=stepped, sent=time.monotonic())


def replica(order: Order) -> None:
    scene = Scene.open(Path(order["scene"]))
    flat, truth = np.zeros(scene.numel, np.uint16), scene.first()
    made = receiver(order["way"], scene, flat, url=order["url"], poll_s=order["poll_s"])
    with closing(made) as receiving:
        receiving.receive(0)
        _answer(served=time.monotonic(), mismatches=int(np.count_nonzero(flat != truth)))
        for each in _orders():
            receiving.receive(each["receive"])
            _answer(served=time.monotonic())
            change = scene.change(each["receive"])
            truth[change.indices] = change.bits
            _heed()  # until all replicas have it: comparing takes a core
            _answer(mismatches=int(np.count_nonzero(flat != truth)))


ROLES: Final[Mapping[str, Callable[[Order], None]]] = {
    "store": store,
    "proxy": proxy,
    "trainer": trainer,
    "replica": replica,
}


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in ROLES:
        raise ConfigError(f"expected one of {', '.join(ROLES)}", hint="the run starts these itself")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started here ends as well
    ROLES[sys.argv[1]](_heed())
    return 0


def _orders() -> Iterator[Order]:
    for line in iter(sys.stdin.readline, ""):
        yield json.loads(line)


def _heed() -> Order:
    for order in _orders():
        return order
    raise SystemExit(0)


def _wait_for_the_end() -> None:
    for _ in _orders():
        pass


def _answer(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
