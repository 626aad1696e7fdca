"""Spools: the objects of a plan as they came over the wire, in a folder that ranks of a host map.

One process of a host fetches a plan and writes its objects here as they arrive. Every rank opens
them, and reads and verifies only the frames of its own elements. The folder is removed with its
owner; existing maps of ranks stay valid.
"""

import errno
import fcntl
import os
import secrets
import shutil
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import msgspec
import numpy as np

from deltachain import errors
from deltachain.chain.fetch import Fetched
from deltachain.chain.tensor_plan import TensorPlan
from deltachain.checkpoint import Checkpoint
from deltachain.codec import ENCODINGS, Part
from deltachain.delta import OldBits
from deltachain.disk_space import FULL, hint_for
from deltachain.errors import ApplyError, DeltaChainError
from deltachain.file_access import map_file
from deltachain.format.documents import Count, ObjectRef, Struct
from deltachain.kernels import host
from deltachain.kernels.protocol import kernels_for
from deltachain.subscribe.targets.tensor_patch import LiveElements
from deltachain.types import Buffer, TensorSpec

if TYPE_CHECKING:
    from .batches import GroupPlan, Stager

INDEX: Final = "index.json"
FAILED: Final = "failed"
LOCK: Final = "lock"
PROBE: Final = "probe"
GONE: Final = "-gone"
UNFINISHED: Final = ".unfinished"
PREFIX: Final = "deltachain-spool-"
"""Prefix of the names of spools; other entries of their folder are left alone."""


class SpooledObject(Struct, frozen=True, kw_only=True):
    ref: ObjectRef
    edge: Count


class SpoolIndex(Struct, frozen=True, kw_only=True):
    """Content of a spool, known before the first object has arrived.

    ``base`` is the folder of the base checkpoint; empty for other plans.
    """

    from_nothing: bool = False
    base: str = ""
    objects: tuple[SpooledObject, ...] = ()

    @classmethod
    def of(cls, fetched: Fetched) -> "SpoolIndex":
        return cls(
            from_nothing=fetched.from_nothing,
            base=str(fetched.base.path) if fetched.base else "",
            objects=tuple(SpooledObject(ref=one.ref, edge=one.edge) for one in fetched.arrivals),
        )


_INDEXES: Final = msgspec.json.Decoder(SpoolIndex)
"""Made at import: msgspec 0.22 crashes when two threads are the first to decode a nested struct."""


class Spool:
    """Objects of one plan, in a folder of this host that is removed with this object.

    Methods that write raise an :class:`ApplyError` if the disk is full or permission is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nbytes = 0
        try:
            held = (folder / LOCK).open("wb")
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)  # a folder without a lock is never swept
            raise
        fcntl.flock(held, fcntl.LOCK_EX)
        self._remove = weakref.finalize(self, _remove, folder, held)

    @classmethod
    def create(cls, parent: Path, index: SpoolIndex, name: str = "") -> "Spool":
        """Create a spool without objects, of a given or a new name."""
        return cls._with(parent, name, INDEX, msgspec.json.encode(index))

    @classmethod
    def probe(cls, parent: Path, word: str) -> "Spool":
        """Create a spool that contains only a random word, by which ranks recognise the folder."""
        return cls._with(parent, "", PROBE, word.encode())

    @classmethod
    def _with(cls, parent: Path, name: str, file: str, data: bytes) -> "Spool":
        with _explained(parent):
            make_folder(parent)
            with _alone(parent):
                _sweep(parent)
                folder = parent / (name or new_name())
                folder.mkdir(mode=0o700)
                spool = cls(folder)
            try:
                _put(folder / file, data)
            except BaseException:
                spool.close()  # a reference to the error would keep the spool on the disk
                raise
        return spool

    def put(self, number: int, data: Buffer) -> None:
        """Write one object; ranks see it whole or not at all."""
        with _explained(self.folder.parent):
            _put(object_file(self.folder, number), data)
        self.nbytes += len(data)

    def put_ranges(self, number: int, nbytes: int, pieces: Iterable[tuple[int, Buffer]]) -> None:
        """Write ranges of one object of ``nbytes`` bytes; the rest of the file is a hole."""
        file = object_file(self.folder, number)
        unfinished = file.with_suffix(UNFINISHED)
        with _explained(self.folder.parent):
            with unfinished.open("wb") as out:
                out.truncate(nbytes)
                for at, data in pieces:
                    out.seek(at)
                    out.write(data)
                    self.nbytes += len(data)
            unfinished.replace(file)

    def move(self, number: int, part: Part) -> None:
        """Write one object, or what was fetched of it; memory then has no other copy.

        Its part reads the file from now on.
        """
        if part.ranges:
            self.put_ranges(number, part.nbytes, part.ranges)
        else:
            self.put(number, part.data)
        part.use_copy(map_file(object_file(self.folder, number)))

    def fail(self, cause: BaseException) -> None:
        """Tell the ranks that wait that no more objects will come."""
        with suppress(OSError):
            why = str(cause.args[0]) if cause.args else type(cause).__name__
            _put(self.folder / FAILED, why.encode(errors="replace"))

    def close(self) -> None:
        self._remove()


def new_name() -> str:
    return PREFIX + secrets.token_hex(8)


def object_file(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.safetensors"


def read_index(folder: Path) -> SpoolIndex:
    return _INDEXES.decode((folder / INDEX).read_bytes())


def writer_is_gone(folder: Path) -> bool:
    """Return whether the process that writes a spool has ended or has removed it."""
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def make_folder(parent: Path) -> None:
    """Create the folder of spools, for this user only; refuse another user's."""
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if {parent.stat().st_uid, parent.lstat().st_uid} != {os.getuid()}:
        raise PermissionError(errno.EACCES, "it is another user's")


@contextmanager
def _explained(parent: Path) -> Iterator[None]:
    """Convert an error of the operating system, and name the folder of spools."""
    try:
        yield
    except DeltaChainError:  # some of its subclasses are OSErrors too
        raise
    except OSError as exc:
        hint = hint_for(exc, parent) or "give DELTACHAIN_SPOOL another folder"
        if exc.errno in FULL:
            hint = "set DELTACHAIN_SPOOL to a folder with more room"
        message = f"{parent}: objects of a plan cannot be written there: {exc}"
        raise ApplyError(message, hint=hint) from exc


def _put(file: Path, data: Buffer) -> None:
    """Write a file under another name, then rename it: readers never see a part of it."""
    unfinished = file.with_suffix(UNFINISHED)
    with unfinished.open("wb") as out:
        out.write(data)
    unfinished.replace(file)


def _remove(folder: Path, held: BinaryIO) -> None:
    """Remove a spool, under another name first: threads that still write find no folder."""
    gone = folder.with_name(f"{folder.name}{GONE}")
    with suppress(OSError):
        folder.rename(gone)
    for _ in range(100):  # a thread that found the folder before it moved may add one more file
        shutil.rmtree(gone, ignore_errors=True)
        if not gone.exists():
            break
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
    """Remove spools of killed processes: their locks are free, or gone already."""
    for left in parent.glob(f"{PREFIX}*"):
        try:
            with (left / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:
            shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue  # its process lives


def host_bits(places: Sequence[LiveElements], spec: TensorSpec, low: int, high: int) -> OldBits:
    """Return bits of the elements ``[low, high)`` that a rank holds, on the host.

    Where those that it holds are consecutive, only these are returned, on the host the live bits
    themselves; others are copied to their places.
    """
    run, nothing = _run(places), np.empty(0, spec.bits_dtype)
    if run is not None:
        storage: Any = places[0].storage
        start, at, numel = run
        return OldBits(host.receive(storage[at : at + numel], nothing), start, shared=True)
    bits, held = np.zeros(high - low, spec.bits_dtype), np.zeros(high - low, np.bool_)
    for place in places:
        here, live = _views(place, bits, low)
        here[...] = host.receive(live, nothing)
        _views(place, held, low)[0][...] = True
    return OldBits(bits, low, held)


def _run(places: Sequence[LiveElements]) -> tuple[int, int, int] | None:
    """Return flat index, position in the storage and number of elements consecutive in both."""
    first, *others = places
    if others:
        return None
    offset, at, dims = first.box
    numel = 1
    for size, there, live in reversed(dims.tolist()):
        if size > 1 and (there, live) != (numel, numel):
            return None
        numel *= size
    return offset, at, numel


def _views(place: LiveElements, flat: Any, start: int) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the elements of a place in flat bits that begin at ``start``, and the live ones."""
    offset, at, dims = place.box
    sizes, there, live = dims.T.tolist() if dims.size else ([1], [1], [1])
    return (
        kernels_for(flat).strided(flat, offset - start, sizes, there),
        kernels_for(place.storage).strided(place.storage, at, sizes, live),
    )


POLL_S: Final = (0.001, 0.004)
"""Shortest and longest wait between two looks for an object, in seconds."""


class SpoolReader:
    """Reader of a spool, for ranks; objects are mapped, and read where they lie.

    In a plan of one edge every object gives elements of its own (FORMAT.md 2): each of its tensors
    is decoded by itself, while later objects are on their way, unless it needs old bits that
    another may change. Longer plans are folded, tensor by tensor, once all objects are there.

    ``abandon`` is called while an object is awaited, and returns whether to stop.
    """

    def __init__(self, folder: Path, abandon: Callable[[], bool] = lambda: False) -> None:
        self._folder = folder
        self._abandon = abandon
        try:
            self._index = read_index(folder)
        except OSError as exc:
            raise errors.ApplyError(f"the spool {folder.name} is gone: {exc.strerror}") from exc
        self.from_nothing = self._index.from_nothing
        self._base = Checkpoint(Path(self._index.base)) if self._index.base else None

    def tensor_plans(self) -> Iterator[TensorPlan]:
        """Yield every tensor plan of the plan, as soon as all of its objects are there."""
        return cast("Iterator[TensorPlan]", self.plans((), frozenset()))

    def plans(
        self, stagers: "Sequence[Stager]", absent: Collection[str]
    ) -> "Iterator[TensorPlan | GroupPlan]":
        """Yield groups of tensors that stagers take, and tensor plans of others.

        Each is yielded as soon as all of its objects are there; tensors that are ``absent`` are
        left out.
        """
        folds = self._base is not None or len({one.edge for one in self._index.objects}) > 1
        alone = () if folds or self.from_nothing else stagers
        later: dict[str, list[tuple[int, Part]]] = {}
        specs: dict[str, TensorSpec] = dict(self._base.specs) if self._base else {}
        opened: list[tuple[int, Part]] = []
        for number, spooled in enumerate(self._index.objects):
            part = self._open(number, spooled)
            opened.append((spooled.edge, part))
            others = (yield from _grouped(opened[-1:], alone)).union(absent)
            for name, row in part.rows.items():
                if name in others:
                    continue
                if folds or self._waits(part, name):
                    later.setdefault(name, []).append((spooled.edge, part))
                    specs.setdefault(name, row.spec)
                else:
                    yield TensorPlan(row.spec, (part,), None, self.from_nothing)
        together = [one for one in stagers if one.folds and not (self._base or self.from_nothing)]
        others = (yield from _grouped(opened, together if folds else ())).union(absent)
        for name in [name for name in specs if name not in others]:
            edges, parts = zip(*later[name], strict=True) if name in later else ((), ())
            yield TensorPlan(specs[name], parts, self._base, self.from_nothing, edges)

    def _waits(self, part: Part, name: str) -> bool:
        """Return whether a tensor of a plan of one edge is decoded with those of later objects."""
        if self.from_nothing:
            row = part.rows[name]
            return ENCODINGS.get(row.encoding).sparse or row.nnz != row.spec.numel
        return part.needs_old(name) and len(self._index.objects) > 1

    def _open(self, number: int, spooled: SpooledObject) -> Part:
        file, ref = object_file(self._folder, number), spooled.ref
        self._await(file, ref.key)
        part = Part.from_bytes(map_file(file), key=ref.key)
        if part.digest != ref.directory:
            raise errors.DigestMismatchError(
                f"{ref.key}: directory", expected=ref.directory, actual=part.digest, key=ref.key
            )
        return part

    def _await(self, file: Path, key: str) -> None:
        wait, longest = POLL_S
        while not file.exists():
            ended = writer_is_gone(self._folder)  # looked at first: a writer may just have finished
            if file.exists():
                return
            failed = self._folder / FAILED
            if failed.exists() or ended:
                why = "the process that fetched it has ended"
                why = failed.read_text(errors="replace") if failed.exists() else why
                raise errors.ApplyError(f"{key} was not fetched: {why}")
            if self._abandon():
                message = f"{key} has not arrived, and the rank cannot wait for it"
                raise errors.StageAbandonedError(message)
            time.sleep(wait)
            wait = min(2 * wait, longest)


def _grouped(
    objects: Sequence[tuple[int, Part]], stagers: "Sequence[Stager]"
) -> "Generator[GroupPlan, None, set[str]]":
    """Yield the groups of tensors that stagers take; return the names of these."""
    taken: set[str] = set()
    for stager in stagers:
        groups, names = stager.groups(objects)
        yield from groups
        taken |= names
    return taken
