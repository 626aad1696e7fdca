"""The four ways of bringing a version from a trainer to a replica.

Full checkpoints and deltas in the layouts of other systems go over S3 with boto3 and nothing of
deltachain's transport: a version is one object, put and got as ``bare_s3.py`` does it. A small
object beside it, put last, says that it is there and how large it is; replicas look for the next
one. Theirs learn it by a request to the engine, or by looking.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import boto3
from botocore.exceptions import ClientError
from safetensors import torch as safetensors_torch

from deltachain import PublishConfig, Publisher, SubscribeConfig, Subscriber
from deltachain.kernels import host
from tests.bench.chains import U16, TensorChange
from tests.bench.cross_region.scene import Scene
from tests.bench.layouts.layout import Objects, PeerLayout
from tests.bench.layouts.registry import SLIME_DELTAS_ZSTD, TRL_GAPS
from tests.bench.store import BareS3

DELTACHAIN: Final = "deltachain"
PEERS: Final[Mapping[str, PeerLayout | None]] = {
    "full checkpoints": None,
    "TRL drafts, gap_delta": TRL_GAPS,
    "slime deltas_zstd": SLIME_DELTAS_ZSTD,
}
WAYS: Final = (*PEERS, DELTACHAIN)


class Sender(Protocol):
    def send(self, version: int) -> None:
        """Return once replicas can see the trainer's live weights as this version."""

    def close(self) -> None: ...


class Receiver(Protocol):
    def receive(self, version: int) -> None:
        """Return once the replica's live weights hold the version."""

    def close(self) -> None: ...


class ChainSender:
    def __init__(self, scene: Scene, flat: U16, url: str) -> None:
        self._weights = scene.tensors(flat)
        self._publisher = Publisher(PublishConfig(url=url, when_busy="wait"))

    def send(self, version: int) -> None:
        if version == 0:
            self._publisher.attach(self._weights.items, assets={})
        else:
            self._publisher.publish(step=version).result()

    def close(self) -> None:
        self._publisher.close()


class ChainReceiver:
    def __init__(self, scene: Scene, flat: U16, url: str, poll_s: float) -> None:
        config = SubscribeConfig(url=url, poll_s=poll_s)
        self._subscriber = Subscriber(config, scene.tensors(flat))
        self._receipts = self._subscriber.follow()

    def receive(self, version: int) -> None:
        while next(self._receipts).version < version:
            pass

    def close(self) -> None:
        self._subscriber.close()


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


class PeerSender:
    """Version 0 is a full checkpoint in every layout; ``None`` sends nothing else."""

    def __init__(self, scene: Scene, flat: U16, layout: PeerLayout | None, shelf: Shelf) -> None:
        self._scene, self._flat, self._layout, self._shelf = scene, flat, layout, shelf
        self._weights = scene.tensors(flat)
        self._snapshot = flat.copy()

    def send(self, version: int) -> None:
        if version == 0 or self._layout is None:
            objects: Objects = (safetensors_torch.save(self._weights, {"format": "pt"}),)
        else:
            objects = self._layout.encode(self._changes())
        self._shelf.put(version, objects)

    def close(self) -> None: ...

    def _changes(self) -> dict[str, TensorChange]:
        """Find changed elements by the kernel of deltachain, the same for every layout."""
        found = {}
        for span in self._scene.spans:
            part = slice(span.start, span.stop)
            changed = host.diff_(self._snapshot[part], self._flat[part])
            found[span.spec.name] = TensorChange(span.spec, *changed)
        return found


class PeerReceiver:
    def __init__(self, scene: Scene, flat: U16, layout: PeerLayout | None, shelf: Shelf) -> None:
        self._layout, self._shelf = layout, shelf
        self._weights = scene.tensors(flat)
        self._specs = {span.spec.name: span.spec for span in scene.spans}
        self._live = {span.spec.name: flat[span.start : span.stop] for span in scene.spans}

    def receive(self, version: int) -> None:
        objects = self._shelf.wait(version)
        if version == 0 or self._layout is None:
            for name, tensor in safetensors_torch.load(objects[0]).items():
                self._weights[name].copy_(tensor)
            return
        for name, write in self._layout.decode(objects, self._specs):
            write.apply(self._live[name])

    def close(self) -> None: ...


def sender(way: str, scene: Scene, flat: U16, *, url: str) -> Sender:
    if way == DELTACHAIN:
        return ChainSender(scene, flat, url)
    return PeerSender(scene, flat, PEERS[way], Shelf(url, poll_s=0))


def receiver(way: str, scene: Scene, flat: U16, *, url: str, poll_s: float) -> Receiver:
    if way == DELTACHAIN:
        return ChainReceiver(scene, flat, url, poll_s)
    return PeerReceiver(scene, flat, PEERS[way], Shelf(url, poll_s=poll_s))
