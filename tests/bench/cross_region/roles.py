"""What the processes of a run do: ``python -m tests.bench.cross_region.roles ROLE``.

Each reads orders and writes answers, JSON objects a line, and ends when its orders do. Times are of
``time.monotonic``, which all processes of a Linux machine share.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import boto3
import numpy as np
import torch
from botocore.exceptions import ClientError
from safetensors import torch as safetensors_torch
from torch import Tensor

from deltachain import PublishConfig, Publisher, SubscribeConfig, Subscriber
from deltachain.errors import ConfigError
from deltachain.kernels import host
from deltachain.types import Indices, TensorSpec
from tests.bench.chains import U16, ModelLayout, SyntheticChain, TensorChange
from tests.bench.cross_region.network import DelayProxy
from tests.bench.layouts import SLIME_DELTAS_ZSTD, TRL_GAPS, Objects, PeerLayout
from tests.bench.report import say
from tests.bench.store import BareS3
from tests.support.seaweed import Seaweed

HEAD: Final = 128
LAYERS: Final = 4
_FIRST: Final = "first.npy"
_NAMES: Final = "tensors.json"


@dataclass(frozen=True, slots=True)
class Span:
    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Change:
    indices: Indices
    bits: U16


@dataclass(frozen=True, slots=True)
class Scene:
    folder: Path
    spans: tuple[Span, ...]

    @classmethod
    def open(cls, folder: Path) -> "Scene":
        rows = json.loads((folder / _NAMES).read_text(encoding="utf-8"))
        specs = [TensorSpec(name, "BF16", tuple(shape)) for name, shape in rows]
        stops = np.cumsum([spec.numel for spec in specs]).tolist()
        spans = zip(specs, [0, *stops], stops, strict=False)
        return cls(folder, tuple(Span(*span) for span in spans))

    @property
    def numel(self) -> int:
        return self.spans[-1].stop

    def first(self) -> U16:
        bits: U16 = np.load(self.folder / _FIRST)
        return bits

    def change(self, version: int) -> Change:
        indices, bits = (np.load(path) for path in _files(self.folder, version))
        return Change(indices.astype(np.int64), bits)

    def tensors(self, flat: U16) -> dict[str, Tensor]:
        whole = torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
        return {
            span.spec.name: whole[span.start : span.stop].view(span.spec.shape)
            for span in self.spans
        }


def layout_of(parameters: int) -> ModelLayout:
    # 24 h**2 of embedding and 12 h**2 a layer.
    width = (parameters / (24 + 12 * LAYERS)) ** 0.5
    heads = max(1, round(width / HEAD))
    hidden = heads * HEAD
    return ModelLayout(
        hidden=hidden,
        intermediate=3 * hidden,
        layers=LAYERS,
        heads=heads,
        kv_heads=max(1, heads // 2),
        head_dim=HEAD,
        vocab=24 * hidden,
    )


def make_scene(folder: Path, *, parameters: int, versions: int, density: float) -> Scene:
    layout = layout_of(parameters)
    say(f"{versions} steps of a model of {layout.numel / 1e6:.1f} M parameters")
    chain = SyntheticChain(layout=layout).with_density(density)
    rows = [(spec.name, spec.shape) for spec in layout.specs()]
    (folder / _NAMES).write_text(json.dumps(rows), encoding="utf-8")
    for version, step in enumerate(chain.steps(versions), start=1):
        if version == 1:
            np.save(folder / _FIRST, np.concatenate([old for old, _ in step.values()]))
        _save(folder, version, _changes(step))
    return Scene.open(folder)


def _changes(step: Mapping[str, tuple[U16, U16]]) -> Iterator[tuple[Indices, U16]]:
    start = 0
    for old, new in step.values():
        at = np.flatnonzero(old != new)
        yield at + start, new[at]
        start += old.size


def _save(folder: Path, version: int, changes: Iterator[tuple[Indices, U16]]) -> None:
    indices, bits = zip(*changes, strict=True)
    at, values = _files(folder, version)
    np.save(at, np.concatenate(indices).astype(np.uint32))
    np.save(values, np.concatenate(bits))


def _files(folder: Path, version: int) -> tuple[Path, Path]:
    return folder / f"{version:04}.indices.npy", folder / f"{version:04}.bits.npy"


DELTACHAIN: Final = "deltachain"
PEERS: Final[Mapping[str, PeerLayout | None]] = {
    "full checkpoints": None,
    "TRL drafts, gap_delta": TRL_GAPS,
    "slime deltas_zstd": SLIME_DELTAS_ZSTD,
}
WAYS: Final = (*PEERS, DELTACHAIN)


class Shelf:
    """Objects of one prefix, ``s3://bucket/prefix``, and a marker for each version."""

    def __init__(self, url: str, *, poll_s: float) -> None:
        parts = urlsplit(url)
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        self._poll_s = poll_s
        self._data = BareS3(url)
        self._client: Any = boto3.client("s3")

    def put(self, version: int, objects: Objects) -> None:
        key = f"versions/{version:06d}"
        self._data.put(key, b"".join(objects))
        marker = json.dumps({"key": key, "sizes": [len(data) for data in objects]}).encode()
        self._client.put_object(Bucket=self._bucket, Key=self._marker(version), Body=marker)

    def wait(self, version: int) -> Objects:
        while (found := self._look(version)) is None:
            time.sleep(self._poll_s)
        data = bytes(self._data.get(found["key"], sum(found["sizes"])))
        objects, start = [], 0
        for size in found["sizes"]:
            objects.append(data[start : start + size])
            start += size
        return tuple(objects)

    def _look(self, version: int) -> dict[str, Any] | None:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._marker(version))
        except ClientError as exc:
            if exc.response["Error"]["Code"] in {"404", "NoSuchKey"}:
                return None
            raise
        return dict(json.loads(answer["Body"].read()))

    def _marker(self, version: int) -> str:
        return f"{self._prefix}/versions/{version:06d}.json"


@contextmanager
def sender(way: str, scene: Scene, flat: U16, url: str) -> Iterator[Callable[[int], None]]:
    """Yield what returns once replicas can see the trainer's live weights as a version."""
    weights = scene.tensors(flat)
    if way == DELTACHAIN:
        with Publisher(PublishConfig(url=url, when_busy="wait")) as publisher:

            def publish(version: int) -> None:
                if version == 0:
                    publisher.attach(weights.items, assets={})
                else:
                    publisher.publish(step=version).result()

            yield publish
        return
    layout, shelf, snapshot = PEERS[way], Shelf(url, poll_s=0), flat.copy()

    def put(version: int) -> None:
        if version == 0 or layout is None:
            objects: Objects = (safetensors_torch.save(weights, {"format": "pt"}),)
        else:
            objects = layout.encode(_found(scene, snapshot, flat))
        shelf.put(version, objects)

    yield put


def _found(scene: Scene, snapshot: U16, flat: U16) -> dict[str, TensorChange]:
    """Find changed elements by the kernel of deltachain, the same for every layout."""
    found = {}
    for span in scene.spans:
        part = slice(span.start, span.stop)
        found[span.spec.name] = TensorChange(span.spec, *host.diff_(snapshot[part], flat[part]))
    return found


@contextmanager
def receiver(
    way: str, scene: Scene, flat: U16, url: str, poll_s: float
) -> Iterator[Callable[[int], None]]:
    """Yield what returns once the replica's live weights hold a version."""
    weights = scene.tensors(flat)
    if way == DELTACHAIN:
        with Subscriber(SubscribeConfig(url=url, poll_s=poll_s), weights) as subscriber:
            receipts = subscriber.follow()

            def follow(version: int) -> None:
                while next(receipts).version < version:
                    pass

            yield follow
        return
    layout, shelf = PEERS[way], Shelf(url, poll_s=poll_s)
    specs = {span.spec.name: span.spec for span in scene.spans}
    live = {span.spec.name: flat[span.start : span.stop] for span in scene.spans}

    def get(version: int) -> None:
        objects = shelf.wait(version)
        if version == 0 or layout is None:
            for name, tensor in safetensors_torch.load(objects[0]).items():
                weights[name].copy_(tensor)
            return
        for name, write in layout.decode(objects, specs):
            write.apply(live[name])

    yield get


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
    with sender(order["way"], scene, flat, order["url"]) as send:
        send(0)
        _answer(sent=0)
        for each in _orders():
            optimizer.prepare(each["step"])
            optimizer.step()
            stepped = time.monotonic()
            send(each["step"])
            _answer(stepped=stepped, sent=time.monotonic())


def replica(order: Order) -> None:
    scene = Scene.open(Path(order["scene"]))
    flat, truth = np.zeros(scene.numel, np.uint16), scene.first()
    with receiver(order["way"], scene, flat, order["url"], order["poll_s"]) as receive:
        receive(0)
        _answer(served=time.monotonic(), mismatches=int(np.count_nonzero(flat != truth)))
        for each in _orders():
            receive(each["receive"])
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
