"""Spools: plans decoded once for all ranks of a host, in a file that each rank maps.

The leader decodes and folds every tensor of a plan and appends its arrays to the file; a rank then
reads its own elements from the page cache, without copies, and nothing is decoded twice. The file
is removed with its owner; existing maps of ranks stay valid.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import shutil
import socket
import tempfile
import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
import numpy.typing as npt

from deltachain.chain.fetch import Fetched
from deltachain.delta import ABSOLUTE, STEP, TensorDelta
from deltachain.errors import ApplyError, BrokenChainError, ConfigError, DeltaChainError
from deltachain.format.documents import Struct
from deltachain.room import FULL, hint_for
from deltachain.types import TensorSpec

DATA: Final = "data"
INDEX: Final = "index.json"
LOCK: Final = "lock"
PROBE: Final = "probe"
PREFIX: Final = "deltachain-spool-"
"""Prefix of the names of spools; other entries of their folder are left alone."""
ALIGN: Final = 64
"""Alignment of arrays in bytes: a cache line."""


class SpooledTensor(Struct, frozen=True, kw_only=True):
    """Location of one tensor's arrays.

    Attributes:
        name: Name of the tensor.
        dtype: Wire dtype of the tensor.
        shape: Full shape of the tensor.
        nnz: Number of elements in the arrays.
        values: Byte offset of the values.
        indices: Byte offset of the int64 indices; ``None`` when dense.
        mask: Byte offset of the mask of absolute elements; or one bool for all elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nnz: int
    values: int
    indices: int | None
    mask: int | bool


class SpoolIndex(Struct, frozen=True, kw_only=True):
    """Content of a spool, and whether its plan needs no base bits."""

    from_nothing: bool
    tensors: tuple[SpooledTensor, ...]


_INDEXES: Final = msgspec.json.Decoder(SpoolIndex)
"""Made at import: msgspec 0.22 crashes when two threads are the first to decode a nested struct."""


class Spool:
    """One plan's decoded tensors, in a folder of this host.

    Attributes:
        folder: Folder of the spool.
        nnz: Number of elements in its arrays.

    Args:
        folder: Folder of the spool; removed with this object, or by ``close``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nnz = 0
        try:
            held = (folder / LOCK).open("wb")
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)  # a folder without a lock is never swept
            raise
        fcntl.flock(held, fcntl.LOCK_EX)
        self._remove = weakref.finalize(self, _remove, folder, held)

    @classmethod
    def write(cls, parent: Path, fetched: Fetched, leave_out: Container[str] = ()) -> Spool:
        """Decode a plan into a new spool.

        Args:
            parent: Folder that every rank of the host can read; created if missing.
            fetched: Objects of the plan.
            leave_out: Names of tensors that no rank holds.

        Raises:
            BrokenChainError: A plan from nothing has only some elements of a tensor.
            ApplyError: The disk is full, or write permission is missing.
        """
        what = f"a plan of {fetched.nbytes:,} bytes could not be decoded there"
        with _explained(parent, what):
            spool = cls._new(parent)
            try:
                spool._fill(fetched, leave_out)
            except BaseException:
                spool.close()  # a reference to the error would keep the spool on the disk
                raise
        return spool

    @classmethod
    def probe(cls, parent: Path, word: str) -> Spool:
        """Create a spool that contains only a word, for :func:`check_probe`.

        Args:
            parent: Folder that every rank of the host can read; created if missing.
            word: Random content, which no other process would write.

        Raises:
            ApplyError: The disk is full, or write permission is missing.
        """
        with _explained(parent, "plans could not be decoded there"):
            spool = cls._new(parent)
            try:
                (spool.folder / PROBE).write_text(word)
            except BaseException:
                spool.close()
                raise
        return spool

    @classmethod
    def _new(cls, parent: Path) -> Spool:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if {parent.stat().st_uid, parent.lstat().st_uid} != {os.getuid()}:
            raise PermissionError(errno.EACCES, "it is another user's")
        with _alone(parent):
            _sweep(parent)
            return cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)))

    def _fill(self, fetched: Fetched, leave_out: Container[str]) -> None:
        rows = []
        with (self.folder / DATA).open("wb") as out:
            for delta in fetched.deltas():
                if fetched.from_nothing and not delta.is_dense:
                    raise BrokenChainError(
                        f"{delta.spec.name}: the plan from nothing gives only {delta.nnz} elements"
                    )
                if delta.spec.name not in leave_out:
                    rows.append(_append(out, delta))
        self.nnz = sum(row.nnz for row in rows)
        index = SpoolIndex(from_nothing=fetched.from_nothing, tensors=tuple(rows))
        (self.folder / INDEX).write_bytes(msgspec.json.encode(index))

    def close(self) -> None:
        """Remove the spool; closing twice is allowed."""
        self._remove()


class SpoolReader:
    """Reader of a spool, for ranks; nothing is copied out of the mapped file.

    Args:
        folder: Folder of the spool.
    """

    def __init__(self, folder: Path) -> None:
        index = _INDEXES.decode((folder / INDEX).read_bytes())
        self.from_nothing = index.from_nothing
        self.rows = {row.name: row for row in index.tensors}
        self._data: mmap.mmap | bytes = b""
        with (folder / DATA).open("rb") as opened:
            if os.fstat(opened.fileno()).st_size:
                self._data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)

    def __iter__(self) -> Iterator[TensorDelta]:
        return (self.read(name) for name in self.rows)

    def read(self, name: str) -> TensorDelta:
        """Return the delta of one tensor; its arrays are read-only views."""
        row = self.rows[name]
        spec = TensorSpec(row.name, row.dtype, row.shape)
        values = self._array(row.values, row.nnz, spec.bits_dtype)
        if row.indices is None:
            return TensorDelta.dense(spec, values)
        mask = ABSOLUTE if row.mask is True else STEP
        if not isinstance(row.mask, bool):
            mask = self._array(row.mask, row.nnz, np.dtype(np.bool_))
        indices = self._array(row.indices, row.nnz, np.dtype("<i8"))
        return TensorDelta(spec=spec, indices=indices, values=values, absolute=mask)

    def _array(self, offset: int, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        return np.frombuffer(self._data, dtype, count, offset)


@contextmanager
def shown(parent: Path) -> Iterator[tuple[str, str]]:
    """Keep a probe in the folder of spools while open, and yield its name and content.

    Raises:
        ApplyError: The disk is full, or write permission is missing.
    """
    word = secrets.token_hex(16)
    probe = Spool.probe(parent, word)
    try:
        yield probe.folder.name, word
    finally:
        probe.close()


def check_probe(folder: Path, word: str) -> None:
    """Check that this process can read the leader's files.

    Args:
        folder: Folder of the leader's probe, in this process's folder of spools.
        word: Content of the leader's probe.

    Raises:
        ConfigError: The probe is not readable here: this process runs on another node, in another
            container, or as another user.
    """
    cause: OSError | None = None
    try:
        if (folder / PROBE).read_bytes() == word.encode():
            return
    except OSError as exc:
        cause = exc
    why = cause.strerror if cause else "it holds something else"
    raise ConfigError(
        f"a rank on {socket.gethostname()} does not see the leader's file in {folder}: {why}",
        hint="the leader and all ranks must share the folder of DELTACHAIN_SPOOL: run them on "
        "one node, or set it on every node to one folder that all of them mount",
    ) from cause


@contextmanager
def _explained(parent: Path, what: str) -> Iterator[None]:
    """Convert an error of the operating system, and name the folder of spools."""
    try:
        yield
    except DeltaChainError:  # some of its subclasses are OSErrors too
        raise
    except OSError as exc:
        hint = hint_for(exc, parent) or "give DELTACHAIN_SPOOL another folder"
        if exc.errno in FULL:
            hint = "set DELTACHAIN_SPOOL to a folder with more room"
        raise ApplyError(f"{parent}: {what}: {exc}", hint=hint) from exc


def _remove(folder: Path, held: BinaryIO) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    held.close()


@contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """Keep other processes from sweeping, and from creating spools, which at first have no lock."""
    folder = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)  # a child forked meanwhile has it open too
        os.close(folder)


def _sweep(parent: Path) -> None:
    """Remove spools of killed leaders: their locks are free."""
    for left in parent.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), left.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent, ignore_errors=True)


def _append(out: BinaryIO, delta: TensorDelta) -> SpooledTensor:
    mask: int | bool = bool(delta.absolute) if delta.absolute.ndim == 0 else False
    if delta.absolute.ndim:
        mask = _put(out, delta.absolute)
    return SpooledTensor(
        name=delta.spec.name,
        dtype=delta.spec.dtype,
        shape=delta.spec.shape,
        nnz=delta.nnz,
        values=_put(out, delta.values),
        indices=None if delta.indices is None else _put(out, delta.indices),
        mask=mask,
    )


def _put(out: BinaryIO, array: npt.NDArray[Any]) -> int:
    at = out.tell()
    out.write(b"\0" * (-at % ALIGN))
    at += -at % ALIGN
    out.write(np.ascontiguousarray(array).view(np.uint8).data)
    return at
