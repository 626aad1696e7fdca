"""The redo journal of a checkpoint folder: parts of absolute bits, and a seal file.

The parts are ordinary parts of FORMAT.md, so the same code verifies them when they are read back.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from deltachain.checkpoint import sync_folder, write_atomic
from deltachain.codec import Change, Part, encode_part
from deltachain.delta import ABSOLUTE, TensorDelta
from deltachain.errors import DigestMismatchError
from deltachain.format.digest import object_digest
from deltachain.format.documents import Document, ObjectRef, dump, parse
from deltachain.subscribe.targets.base import HeldVersion
from deltachain.subscribe.targets.patch import Patch
from deltachain.types import StateDigest

FOLDER: Final = ".deltachain-journal"
SEAL: Final = "seal.json"
PART_NBYTES: Final = 256 << 20
"""Bytes of patches in one part, which bounds the memory used to write the journal."""


class Seal(Document, frozen=True, kw_only=True):
    """The seal of a complete journal: the version that it leads to, and its parts."""

    held: HeldVersion
    parts: tuple[ObjectRef, ...]


class Journal:
    """New bits on their way into a folder.

    Args:
        folder: Path of the checkpoint folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    def write(self, patches: Iterable[Patch], held: HeldVersion) -> Seal:
        """Write patches durably, and seal them; from then on they will be applied."""
        self.clear()
        self._folder.mkdir()
        refs = [self._put(number, group) for number, group in enumerate(_groups(patches))]
        seal = Seal(held=held, parts=tuple(refs))
        write_atomic(self._folder / SEAL, dump(seal))
        sync_folder(self._folder.parent)
        return seal

    def pending(self) -> Seal | None:
        """Return the seal of a complete journal; ``None`` for an incomplete one, a link, or none.

        Raises:
            FormatError: The seal is corrupt.
        """
        file = self._folder / SEAL
        if self._folder.is_symlink() or not file.is_file():
            return None
        return parse(file.read_bytes(), Seal, key=str(file))

    def read(self, seal: Seal) -> Iterator[TensorDelta]:
        """Yield the journal's tensors, verified.

        Raises:
            FormatError: A part differs from the one that was written.
        """
        for ref in seal.parts:
            data = (self._folder / ref.key).read_bytes()
            actual = object_digest(data)
            if actual != ref.blake3:
                key = str(self._folder / ref.key)
                raise DigestMismatchError(key, expected=ref.blake3, actual=actual, key=key)
            yield from Part.from_bytes(data, key=ref.key)

    def clear(self) -> None:
        """Remove the journal, and nothing that a planted link leads to."""
        if self._folder.is_symlink():
            self._folder.unlink()
        (self._folder / SEAL).unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _put(self, number: int, group: list[Patch]) -> ObjectRef:
        part = encode_part(Change(_absolute(patch), StateDigest()) for patch in group)
        name = f"{number:05d}.safetensors"
        write_atomic(self._folder / name, part.content)
        return ObjectRef(
            key=name, nbytes=len(part.content), blake3=part.digest, directory=part.directory
        )


def _groups(patches: Iterable[Patch]) -> Iterator[list[Patch]]:
    group: list[Patch] = []
    nbytes = 0
    for patch in patches:
        if group and nbytes + patch.nbytes > PART_NBYTES:
            yield group
            group, nbytes = [], 0
        group.append(patch)
        nbytes += patch.nbytes
    if group:
        yield group


def _absolute(patch: Patch) -> TensorDelta:
    """Return the patch's new bits as a delta that needs no base."""
    new = np.asarray(patch.new)
    if patch.indices is None:
        return TensorDelta.dense(patch.spec, new)
    indices = np.asarray(patch.indices)
    return TensorDelta(spec=patch.spec, indices=indices, values=new, absolute=ABSOLUTE)
