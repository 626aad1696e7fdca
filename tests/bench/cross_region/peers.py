"""Full checkpoints and others' deltas over S3, with boto3 and nothing of deltachain's transport."""

from __future__ import annotations

import json
import time
from typing import Any, Final
from urllib.parse import urlsplit

import boto3
import numpy as np
import torch
from botocore.exceptions import ClientError
from torch import Tensor

from deltachain.kernels import host
from tests.bench.bare_s3 import BareS3
from tests.bench.chains import U16
from tests.bench.cross_region.layouts import Changes, Layout, TensorChange, full_file, load_full
from tests.bench.cross_region.scene import Scene

_ABSENT: Final = ("404", "NoSuchKey")


class Shelf:
    def __init__(self, url: str, *, poll_s: float) -> None:
        parts = urlsplit(url)
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        self._poll_s = poll_s
        self._data = BareS3(url)
        self._client: Any = boto3.client("s3")

    def put(self, version: int, key: str, data: bytes) -> None:
        self._data.put(key, data)
        marker = json.dumps({"key": key, "nbytes": len(data)}).encode()
        self._client.put_object(Bucket=self._bucket, Key=self._marker(version), Body=marker)

    def wait(self, version: int) -> bytearray:
        while (found := self._look(version)) is None:
            time.sleep(self._poll_s)
        return self._data.get(found["key"], found["nbytes"])

    def _look(self, version: int) -> dict[str, Any] | None:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._marker(version))
        except ClientError as exc:
            if exc.response["Error"]["Code"] in _ABSENT:
                return None
            raise
        found: dict[str, Any] = json.loads(answer["Body"].read())
        return found

    def _marker(self, version: int) -> str:
        return f"{self._prefix}/versions/{version:06d}.json"


class PeerSender:
    def __init__(self, scene: Scene, flat: U16, layout: Layout | None, shelf: Shelf) -> None:
        self._scene, self._flat, self._layout, self._shelf = scene, flat, layout, shelf
        self._weights = scene.tensors(flat)
        self._snapshot = flat.copy()

    def send(self, version: int) -> None:
        if version == 0 or self._layout is None:
            key, data = f"full/{version:06d}/model.safetensors", full_file(self._weights)
        else:
            key = self._layout.key(version)
            changes = self._changes()
            data = self._layout.encode(changes, version=version, numel=self._scene.numel)
        self._shelf.put(version, key, data)

    def close(self) -> None: ...

    def _changes(self) -> Changes:
        found = {}
        for span in self._scene.spans:
            part = slice(span.start, span.stop)
            changed = host.diff_(self._snapshot[part], self._flat[part])
            found[span.spec.name] = TensorChange(span.spec.shape, changed.indices, changed.new)
        return found


class PeerReceiver:
    def __init__(self, scene: Scene, flat: U16, layout: Layout | None, shelf: Shelf) -> None:
        self._layout, self._shelf = layout, shelf
        self._weights = scene.tensors(flat)
        self._live: dict[str, Tensor] = {
            name: tensor.view(-1).view(torch.int16) for name, tensor in self._weights.items()
        }

    def receive(self, version: int) -> None:
        data = bytes(self._shelf.wait(version))
        if version == 0 or self._layout is None:
            load_full(data, self._weights)
            return
        for name, indices, bits in self._layout.decode(data):
            values = torch.from_numpy(np.ascontiguousarray(bits).view(np.int16))
            self._live[name].index_copy_(0, torch.from_numpy(indices), values)

    def close(self) -> None: ...
