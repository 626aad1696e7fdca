"""Encode the difference of two checkpoints in one part, and apply it: ``diff`` and ``patch``."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from deltachain.checkpoint import Checkpoint, creating, sync, sync_folder
from deltachain.codec import ENCODINGS, Change, EncodedPart, Part, encode_part
from deltachain.codec.encodings import Encoding
from deltachain.codec.encodings.sparse import StepEncoding
from deltachain.codec.old_bits import OldBits
from deltachain.codec.row_digests import RowDigests
from deltachain.delta import ABSOLUTE, STEP, TensorDelta
from deltachain.errors import BaseMismatchError, ConfigError, MalformedError
from deltachain.file_reader import FileReader
from deltachain.filebits import FileBits
from deltachain.format.keys import digest_key
from deltachain.kernels import host
from deltachain.kernels.move import digest_change, move
from deltachain.types import Bits, TensorSpec, check_spec
from deltachain.verify import counted

MARKS: Final = ("deltachain.json", ".deltachain-journal")
"""Status files of a folder that follows a chain; not copied, since a copy has other weights."""

MAYBE_DENSE: Final = 8
"""Elements for each change up to which a dense encoding may be smaller than a sparse one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDiff:
    """The difference of two checkpoints, as one part.

    Attributes:
        part: The encoded part.
        tensors: Number of changed tensors.
        nnz: Number of changed elements, those of dense tensors included.
        numel: Elements of all tensors.
        nbytes: Bytes of all tensors.
    """

    part: EncodedPart
    tensors: int
    nnz: int
    numel: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Applied:
    """Number of tensors and elements that a part changed."""

    tensors: int
    nnz: int


def compare(old: Path, new: Path, encoding: str) -> CheckpointDiff:
    """Encode the difference from ``old`` to ``new``.

    Raises:
        ConfigError: No encoding of changed elements has that name.
        TensorMismatchError: Names, shapes or dtypes of the tensors differ.
    """
    chosen, before, after = ENCODINGS.chosen(encoding), Checkpoint(old), Checkpoint(new)
    for name in sorted(before.specs.keys() | after.specs.keys()):
        _check_spec(name, before.specs.get(name), old, after.specs.get(name), new)
    found: list[Change] = []
    nnz = 0
    for name, spec in after.specs.items():
        changed = _change(spec, before.bits(name), after.bits(name), chosen)
        if changed is not None:
            found.append(changed[0])
            nnz += changed[1]
    return CheckpointDiff(
        part=encode_part(found, raw=chosen.own_arrays),
        tensors=len(found),
        nnz=nnz,
        numel=sum(spec.numel for spec in after.specs.values()),
        nbytes=sum(spec.nbytes for spec in after.specs.values()),
    )


def _change(
    spec: TensorSpec, old: Bits, new: Bits, encoding: Encoding
) -> tuple[Change, int] | None:
    """Encode one tensor, sparse or dense by size; return it with its number of changes."""
    changes = host.diff_(old.copy(), new)
    if not changes.indices.size:
        return None
    if not encoding.suits(spec):
        encoding = StepEncoding()
    sparse = TensorDelta(
        spec=spec,
        indices=changes.indices,
        values=changes.new if encoding.absolute else changes.new - changes.old,
        absolute=ABSOLUTE if encoding.absolute else STEP,
    )
    before = partial(OldBits, old) if encoding.encodes_with_old(spec) else None
    change = Change(sparse, digest_change(spec, *changes), encoding=encoding, old=before)
    nnz = changes.indices.size
    if MAYBE_DENSE * nnz >= spec.numel:
        whole = Change(TensorDelta.dense(spec, new), host.digest(digest_key(spec), new))
        raw = encoding.own_arrays
        if len(encode_part([whole], raw=raw).content) < len(encode_part([change], raw=raw).content):
            change = whole
    return change, nnz


def apply(base: Path, file: Path, out: Path) -> Applied:
    """Apply a part to ``base`` and write the result to ``out``, atomically.

    Raises:
        TensorMismatchError: The base lacks a tensor of the part, or has another shape or dtype.
        BaseMismatchError: The bits of the base differ from those the part was made from.
        FormatError: The part is corrupt.
    """
    part = _open_part(file)
    part.verify()
    checkpoint = Checkpoint(base)
    for name, row in part.rows.items():
        _check_spec(name, checkpoint.specs.get(name), base, row.spec, file)
    copy = _copied_folder if base.is_dir() else _copied_file
    with copy(base, out) as partial:
        digests = RowDigests(part.rows.values())
        for name in part.rows:
            _apply_row(checkpoint, part, name, digests, partial)
    return Applied(len(part.rows), part.nnz)


def _open_part(file: Path) -> Part:
    reader = FileReader(file)
    return Part(reader.read_at, reader.nbytes, key=str(file))


def _apply_row(
    checkpoint: Checkpoint, part: Part, name: str, digests: RowDigests, partial: Path
) -> None:
    """Write one tensor's change into the copy, and verify it with those of the same digest."""
    row, old = part.rows[name], checkpoint.bits(name)
    delta = _read(checkpoint, part, name, old)
    moved = move(old, delta)
    found = digests.add(name, counted(moved, row))
    if found is not None and found.actual != found.expected:
        why = f"expected a change of {found.expected}, found {found.actual}"
        raise _other_bits(checkpoint, part, name, digests.named(name), why)
    if not delta.spec.numel:
        return
    source, offset = checkpoint.place(name)
    target = partial / source.name if partial.is_dir() else partial
    FileBits(target, offset, delta.spec).put(delta.indices, moved.new)
    sync(target)


def _read(checkpoint: Checkpoint, part: Part, name: str, old: Bits) -> TensorDelta:
    """Decode a tensor of a verified part; where that fails, it is of other old bits."""
    try:
        return part.read(name, old=OldBits(old))
    except MalformedError as exc:
        if not part.needs_old(name):
            raise
        raise _other_bits(checkpoint, part, name, repr(name), str(exc.args[0])) from exc


def _other_bits(
    checkpoint: Checkpoint, part: Part, tensor: str, names: str, why: str
) -> BaseMismatchError:
    return BaseMismatchError(
        f"{checkpoint.path}: {names} does not hold the bits that {part.key} was made from: {why}; "
        "nothing was written",
        tensor=tensor,
        hint="patch the checkpoint that was OLD when the delta was made",
    )


@contextmanager
def _copied_file(base: Path, out: Path) -> Iterator[Path]:
    """Yield a writable copy of a file; replace ``out`` by it on success."""
    if out.is_dir():
        raise ConfigError(f"{out} is a folder, {base} is a file", hint="name a file after --out")
    with creating(out) as partial:
        shutil.copyfile(base, partial)
        yield partial


@contextmanager
def _copied_folder(base: Path, out: Path) -> Iterator[Path]:
    """Yield a writable copy of a folder; rename it to ``out`` on success."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already", hint="name a folder that is not there yet")
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    try:
        partial, ignore = scratch / out.name, shutil.ignore_patterns(*MARKS)
        shutil.copytree(base, partial, ignore=ignore, copy_function=shutil.copyfile)
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                sync(file)
        partial.replace(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sync_folder(out.absolute().parent)


def _check_spec(
    name: str, one: TensorSpec | None, at: Path, other: TensorSpec | None, there: Path
) -> None:
    hint = "both must have the same tensors: names, shapes, dtypes"
    check_spec(name, one, at, other, there, hint=hint)
