"""slime, miles and ModelExpress: a folder is a checkpoint, or frames of what changed.

The index tells which.

* slime: ``weight_v000007/``; version 0 is the checkpoint that engines start from. Source: slime
  624b824a8 (``update_weight_from_disk_delta.py``; miles 31f1ca961 writes the same), and
  ``/pull_weights`` of its SGLang.
* ModelExpress: ``v7/``. Receivers learn of a version from a catalogue: make it READY there once its
  index is written. Source: ModelExpress 0.7.0
  (``modelexpress_rl/train/methods/canonical_delta.py``), and its docs/S3_DELTA_WEIGHT_REFIT.md.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from deltachain.bridges import files
from deltachain.bridges.dialect import Dialect, ElementChange, HostModel, Objects, required
from deltachain.bridges.frames import checksum, new_bits, xor_frames
from deltachain.checkpoint import INDEX_FILE
from deltachain.errors import MalformedError
from deltachain.store import Store
from deltachain.types import Bits


@dataclass(frozen=True, slots=True)
class IndexedDialect(Dialect):
    """A folder a version, whose index is written last and says what its files are."""

    folder: str  # of a number, as a format string
    version: str  # name of a number in the index
    algorithm: str  # of checksums

    def number(self, key: str) -> int | None:
        folder, _, file = key.rpartition("/")
        found = re.search(r"\d{1,12}", folder)
        named = found is not None and folder == self.folder.format(int(found[0]))
        return int(found[0]) if found and named and files.is_checkpoint_marker(file) else None

    def full(self, number: int, model: HostModel) -> Objects:
        return files.checkpoint(self.folder.format(number), model)

    def delta(self, number: int, model: HostModel, changes: Sequence[ElementChange]) -> Objects:
        frames = (files.Array(one.spec.name, "U8", frame) for one, frame in xor_frames(changes))
        made = list(files.grouped(frames, lambda array: array.values.nbytes))
        folder, places = self.folder.format(number), dict[str, str]()
        for at, arrays in enumerate(made):
            file = f"model-{at:05d}-of-{len(made):05d}.safetensors"
            proofs = {a.name: checksum(self.algorithm, model.bits(a.name)) for a in arrays}
            places |= dict.fromkeys(proofs, file)
            yield f"{folder}/{file}", files.packed(arrays, proofs)
        yield f"{folder}/{INDEX_FILE}", self.index(number, places)

    def index(self, number: int, places: dict[str, str]) -> bytes:
        metadata = {
            "version": self.version.format(number),
            "base_version": self.version.format(number - 1),
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": self.algorithm,
        }
        return json.dumps({"metadata": metadata, "weight_map": places}).encode()

    def is_full(self, store: Store, key: str) -> bool:
        return not key.endswith(INDEX_FILE) or (
            "delta_encoding" not in files.read_index(store, key).metadata
        )

    def read(self, store: Store, key: str, before: HostModel | None) -> HostModel:
        number = self.number(key) or 0
        if self.is_full(store, key):
            return files.read_checkpoint(store, key)
        index, old = files.read_index(store, key), required(before, key)
        said = index.metadata
        versions = {"version": number, "base_version": number - 1}
        expected = {name: self.version.format(one) for name, one in versions.items()}
        found = {name: said.get(name) for name in expected}
        if found != expected or said.get("compression_format") != "zstd":
            raise MalformedError(f"{key}: expected {expected} of zstd, found {said}", key=key)
        encoding, algorithm = str(said["delta_encoding"]), str(said.get("checksum_format"))

        def new(file: files.TensorFile, name: str) -> Bits:
            return new_bits(
                file.read(file.entry(name, "U8")),
                old.bits(name),
                encoding=encoding,
                algorithm=algorithm,
                want=file.header.metadata.get(name, ""),
                key=f"{file.key}, {name}",
            )

        reads = dict[str, Callable[[], Bits]]()
        for file, names in index.files():
            opened = files.TensorFile.open(store, files.beside(key, file))
            reads |= {old.spec(name, key).name: partial(new, opened, name) for name in names}
        return old.changed(reads)


SLIME: Final = IndexedDialect("weight_v{:06d}", "{:06d}", "xxh3-128")
MODELEXPRESS: Final = IndexedDialect("v{}", "v{}", "adler32")
