"""A checkpoint folder as a target: a mirror on disk that survives a kill at any moment.

New bits go into a journal first. Once the journal is complete and durable, it *is* the swap: after
any interruption of the write, opening the folder again finishes it, and a repetition changes
nothing.
"""

import fcntl
import logging
import os
import shutil
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Final, TypeAlias

import numpy as np

from deltachain import checkpoint as checkpoints
from deltachain import errors
from deltachain.chain.chain import Chain
from deltachain.chain.checks import asset_paths
from deltachain.chain.fetch import Fetched
from deltachain.chain.identity import chain_around
from deltachain.checkpoint import LIBRARY, differing_fields, fields
from deltachain.codec import Change, Part, encode_part
from deltachain.delta import ABSOLUTE, PIECE_NBYTES, OldBits, Piece, TensorDelta, pieces
from deltachain.disk_space import check_room, fill_holes, hint_for, reserve
from deltachain.file_access import FileBits
from deltachain.format.documents import Document, ObjectRef, dump, parse
from deltachain.format.keys import digest_key, object_digest
from deltachain.kernels import host
from deltachain.kernels.protocol import move, same_bits
from deltachain.remote_code import bare, without_remote_code
from deltachain.subscribe.targets.base import HeldVersion, PatchedTarget, Patches, Prepared
from deltachain.subscribe.targets.tensor_patch import Patch, sum_states
from deltachain.threads import Pool, cores
from deltachain.types import Bits, StateDigest, TensorSpec, Version, check_spec

# The parts are ordinary parts of FORMAT.md, so the same code verifies them when they are read back.


FOLDER: Final = ".deltachain-journal"
SEAL: Final = "seal.json"
PART_NBYTES: Final = 64 << 20  # bounds the memory used to write the journal
BUDGET: Final = 64 << 20
"""Bytes of staged bits to keep where none are undone: others are decoded again, which costs less
than to write them."""


class Seal(Document, frozen=True, kw_only=True):
    """The seal of a complete journal: the version that it leads to, and its parts."""

    held: HeldVersion
    parts: tuple[ObjectRef, ...]


class Journal:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    def write(self, patches: Iterable[Patch], held: HeldVersion) -> Seal:
        self.clear()
        self._folder.mkdir()
        refs = [self._put(number, group) for number, group in enumerate(_groups(patches))]
        seal = Seal(held=held, parts=tuple(refs))
        checkpoints.write_atomic(self._folder / SEAL, dump(seal))
        checkpoints.sync_folder(self._folder.parent)
        return seal

    def pending(self) -> Seal | None:
        """Return the seal of a complete journal; ``None`` for an incomplete one, a link or none."""
        file = self._folder / SEAL
        if self._folder.is_symlink() or not file.is_file():
            return None
        return parse(file.read_bytes(), Seal, key=str(file))

    def read(self, seal: Seal) -> Iterator[TensorDelta]:
        for ref in seal.parts:
            data = (self._folder / ref.key).read_bytes()
            actual = object_digest(data)
            if actual != ref.blake3:
                key = str(self._folder / ref.key)
                raise errors.DigestMismatchError(key, expected=ref.blake3, actual=actual, key=key)
            part = Part.from_bytes(data, key=ref.key)
            yield from (part.read(name, (0, row.spec.numel)) for name, row in part.rows.items())

    def clear(self) -> None:
        if self._folder.is_symlink():
            self._folder.unlink()
        (self._folder / SEAL).unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _put(self, number: int, group: list[list[Patch]]) -> ObjectRef:
        part = encode_part(Change(_absolute(windows), StateDigest()) for windows in group)
        name = f"{number:05d}.safetensors"
        checkpoints.write_atomic(self._folder / name, part.content)
        return ObjectRef(
            key=name, nbytes=len(part.content), blake3=part.digest, directory=part.directory
        )


def _groups(patches: Iterable[Patch]) -> Iterator[list[list[Patch]]]:
    """Yield the patches of each part by tensor: windows that are consecutive, or all sparse."""
    group: list[list[Patch]] = []
    nbytes = 0
    for patch in patches:
        size = patch.without_old().nbytes
        same = bool(group) and group[-1][0].spec.name == patch.spec.name
        if group and (nbytes + size > PART_NBYTES or (same and not _follows(patch, group[-1][-1]))):
            yield group
            group, nbytes, same = [], 0, False
        if same:
            group[-1].append(patch)
        else:
            group.append([patch])
        nbytes += size
    if group:
        yield group


def _follows(patch: Patch, before: Patch) -> bool:
    if patch.indices is None or before.indices is None:
        return patch.indices is before.indices and patch.start == before.start + before.nnz
    return True


def _absolute(windows: list[Patch]) -> TensorDelta:
    spec, new = windows[0].spec, np.concatenate([np.asarray(patch.new) for patch in windows])
    if windows[0].indices is None:
        return TensorDelta.run(spec, windows[0].start, new)
    indices = np.concatenate([np.asarray(patch.indices) for patch in windows])
    return TensorDelta(spec=spec, indices=indices, values=new, absolute=ABSOLUTE)


Stamps: TypeAlias = Mapping[Path, tuple[int, int, int]]  # inode, bytes, ns


def stamps_of(files: Iterable[Path]) -> Stamps:
    stamps = {}
    for file in files:
        with suppress(FileNotFoundError):
            found = file.stat()
            stamps[file] = (found.st_ino, found.st_size, found.st_mtime_ns)
    return stamps


LOCK_FILE: Final = ".deltachain-lock"


class FolderLock:
    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / LOCK_FILE
        self._descriptor = -1
        self._unlock: weakref.finalize[..., FolderLock] | None = None
        self._made = False

    def take(self) -> None:
        folder = self._folder
        nearest = next((one for one in (folder, *folder.parents) if one.exists()), None)
        if nearest is not None and not nearest.is_dir():
            raise errors.ConfigError(
                f"{nearest} is not a folder", hint="name a new folder, or one that this chain fills"
            )
        while not self._is_held():
            self._try()

    def release(self) -> None:
        """Unlock the folder; idempotent. A folder that was never filled is removed again."""
        if self._unlock is None or not self._unlock.alive:
            return
        with suppress(OSError):
            if [file.name for file in self._folder.iterdir()] == [LOCK_FILE]:
                self._file.unlink()
                if self._made:
                    self._folder.rmdir()
        self._unlock()

    def _is_held(self) -> bool:
        if self._unlock is None or not self._unlock.alive:
            return False
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._descriptor), self._file.stat())
        return False

    def _try(self) -> None:
        """Lock the file; a process that closes an empty folder may remove it meanwhile."""
        if self._unlock is not None:
            self._unlock()
        self._made |= not self._folder.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise errors.ConfigError(
                f"{file} is a link or a device, not a file",
                hint="see who writes to this folder, and remove it",
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(file, flags, 0o666)
        self._unlock = weakref.finalize(self, os.close, self._descriptor)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as exc:
            self._unlock()
            raise errors.ConfigError(
                f"another process writes to {self._folder}",
                hint="give every follower a folder of its own",
            ) from exc


logger = logging.getLogger(__name__)


class HeldFile(Document, frozen=True, kw_only=True):
    """The chain of a folder, and the version it holds: none while a swap is being written."""

    chain: str
    held: HeldVersion | None


@contextmanager
def unwritten(folder: Path, version: Version) -> Iterator[None]:
    """Convert errors of writes that are not seen yet to a ``PartialApplyError``."""
    try:
        yield
    except (OSError, errors.FormatError, errors.ConfigError) as exc:
        raise errors.PartialApplyError(
            f"{folder}: version {version} could not be written down, the weights are as they were: "
            f"{exc}",
            version=version,
            hint=hint_for(exc, folder),
        ) from exc


class NewWeights:
    """A weights file that is written a tensor at a time and does not appear before :meth:`put`.

    Released without it, or by a killed process, it leaves nothing that is taken for weights.
    """

    def __init__(self, file: Path, version: Version) -> None:
        self._file, self._version = file, version
        self._partial = checkpoints.create(file)
        self.drop = weakref.finalize(self, self._partial.unlink, missing_ok=True)
        self._checking, self._has_room = Lock(), False

    def begin(self, specs: Mapping[str, TensorSpec]) -> None:
        self._nbytes = sum(spec.nbytes for spec in specs.values())
        with unwritten(self._file.parent, self._version):
            self._starts = checkpoints.begin(self._partial, specs.values())

    def write(self, patch: Patch) -> Patch:
        """Write all bits of a window, and return its patch without memory for them.

        Room is taken for what was decoded, not for what a chain says that it has.
        """
        start = self._starts[patch.spec.name]
        at = start + patch.start * patch.spec.itemsize
        with self._checking:
            if not self._has_room:
                check_room(self._file.parent, self._nbytes)
                self._has_room = True
            with unwritten(self._file.parent, self._version):  # one at a time: it may truncate
                reserve(self._partial, patch.new.nbytes, at)
        with unwritten(self._file.parent, self._version):
            FileBits(self._partial, start, patch.spec).put(None, np.asarray(patch.new), patch.start)
        new = np.broadcast_to(np.zeros(1, patch.spec.bits_dtype), patch.new.shape)
        return replace(patch, new=new)

    def put(self) -> Stamps:
        made = stamps_of([self._partial])[self._partial]
        checkpoints.put_in_place(self._partial, self._file)
        return {self._file: made}


@dataclass(frozen=True, slots=True, kw_only=True)
class Written(Patches):
    """Patches whose bits are in a new weights file already."""

    weights: NewWeights

    @property
    def can_undo(self) -> bool:
        return False


class FolderTarget(PatchedTarget):
    """A checkpoint folder, created if missing, written by one process at a time.

    The first swap creates the weights of a folder without any, and must then write every tensor.
    Files other than weights are left alone.
    """

    piece_nbytes = PIECE_NBYTES

    def __init__(self, folder: Path) -> None:
        self.folder = self.room = folder
        self.assets = frozenset[str]()  # paths in the chain, which say whether it is an adapter's
        self._journal = Journal(folder)
        self._specs: Mapping[str, TensorSpec] = {}
        self._aliases: Mapping[str, str] = {}
        self._live: dict[str, list[FileBits]] = {}
        self._stamps: Stamps | None = {}  # None: to be mapped and read again
        self._lock = FolderLock(folder)
        self._new = weakref.WeakSet[NewWeights]()  # staged, and not yet in place

    def bind(self, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> None:
        """Match tensors by name, and finish an interrupted swap, or raise a ``PoisonedError``."""
        self._specs, self._aliases, self._live = specs, aliases, {}
        with explained(self.folder):
            self._lock.take()
            checkpoints.remove_partials(
                self.folder, ".*.safetensors.*", f".{checkpoints.HELD_FILE}.*"
            )
            self._map()
            self._recover()
            self._stamps = self._stamped()

    def close(self) -> None:
        """Release the folder; one that was never filled is left in its original state."""
        for new in self._new:
            new.drop()
        self._lock.release()

    def held(self) -> HeldVersion | None:
        file = self.folder / checkpoints.HELD_FILE
        with explained(self.folder):
            if not self._live or not file.is_file():
                return None
            try:
                return parse(file.read_bytes(), HeldFile, key=str(file)).held
            except errors.FormatError:  # a damaged or foreign file: the state digest decides
                return None

    def state(self) -> StateDigest | None:
        with explained(self.folder), Pool(cores()) as pool:
            self._map_if_altered()
            if not self._live:
                return None
            return sum_states(self.ordered(pool, self._state_of, pieces(self._specs.values())))

    def is_altered(self) -> bool:
        with explained(self.folder):
            self._lock.take()  # again, if the folder was removed
            return self._stamped() != self._stamps

    def _stamped(self) -> Stamps:
        return stamps_of(self._files())

    def _wrote(self, before: Stamps) -> None:
        """Take the files as they are after a write, unless they are others or of another size."""
        after = self._stamped()
        was, now = ({file: stamp[:2] for file, stamp in one.items()} for one in (before, after))
        self._stamps = after if was == now else None

    def _map_if_altered(self) -> bool:
        """Map the files again if another process changed them; return whether it did."""
        stamps = self._stamped()
        if stamps == self._stamps:
            return False
        self._map()
        self._stamps = stamps
        return True

    def _state_of(self, piece: Piece) -> StateDigest | None:
        first, *others = self._live[piece.spec.name]
        key, total = digest_key(piece.spec), StateDigest()
        for _, low, high in piece.windows():
            bits = first.read(low, high)
            if any(not same_bits(bits, other.read(low, high)) for other in others):
                return None
            total += host.digest(key, bits, low)
        return total

    def stage(
        self, fetched: Fetched, *, base: StateDigest | None, state: StateDigest, budget: int
    ) -> Patches:
        if base is None:
            with explained(self.folder):
                self._map_if_altered()
        if self._live:
            return super().stage(fetched, base=base, state=state, budget=budget)
        with explained(self.folder):
            return self._stage_new(fetched, base, state)

    def _stage_new(
        self, fetched: Fetched, base: StateDigest | None, state: StateDigest
    ) -> "Written":
        """Decode into a new weights file."""
        file = self.folder / checkpoints.weights_file(self._specs, self.assets)
        new = NewWeights(file, fetched.plan.edges[-1].version)
        self._new.add(new)
        try:
            new.begin(self._specs)
            found = self._stage(fetched, base=base, state=state, budget=sys.maxsize, keep=new.write)
        except BaseException:
            new.drop()
            raise
        return Written(
            patches=found.patches,
            deferred=(),
            fetched=None,
            nnz=found.nnz,
            base_too=found.base_too,
            weights=new,
        )

    def decodes_once(self, specs: Iterable[TensorSpec], budget: int) -> bool:
        return not self._live or super().decodes_once(specs, budget)

    def swap(self, prepared: Prepared, held: HeldVersion) -> float:
        if not isinstance(prepared, Written):
            return super().swap(prepared, held)
        start = time.perf_counter()
        try:
            with unwritten(self.folder, held.version):
                self._refuse_altered(held)
                self._remember(held.chain, held)  # without weights it has no effect
                made = prepared.weights.put()
                self._map()
        finally:
            prepared.weights.drop()
        self._wrote(made)
        return time.perf_counter() - start

    def patches(self, fetched: Fetched, piece: Piece, *, base_too: bool | None) -> Iterator[Patch]:
        """Compute patches; of dense deltas only, without old bits, if there are no weights yet."""
        live = self._live.get(piece.spec.name)

        def bits(low: int, high: int) -> Bits:
            with explained(self.folder):
                return live[0].read(low, high) if live else np.empty(0, piece.spec.bits_dtype)

        def old(low: int, high: int) -> OldBits:
            return OldBits(bits(low, high), low)

        plan = fetched.tensor_plan(piece.spec.name)
        for (spec, low, high), delta in plan.windows(piece, old if live else None):
            if not delta.nnz:
                continue
            moved = move(bits(low, high), delta, low)
            change, is_dense = moved.change, delta.indices is None
            if is_dense:
                change = StateDigest()
                if live and base_too:
                    change = moved.added - host.digest(digest_key(spec), moved.old, delta.start)
            yield Patch(
                spec=spec,
                indices=delta.indices,
                old=moved.old if live else None,
                new=moved.new,
                change=change,
                written=moved.added if is_dense else StateDigest(),
                start=delta.start,
            )

    def write(self, patches: Iterable[Patch], held: HeldVersion) -> None:
        try:
            with unwritten(self.folder, held.version):
                self._refuse_altered(held)
                if not self._live:
                    raise errors.ConfigError(f"{self.folder} has no weights")
                if any(_is_shared(file) for file in self._files()):  # a backup since the last swap
                    self._map()
                    self._stamps = self._stamped()
                seal = self._journal.write(patches, held)
                before = self._stamped()
                self._refuse_altered(held)
        except errors.PartialApplyError:
            self._journal.clear()
            raise
        self._stamps = None  # until all is written: whoever heals it maps the files again
        try:
            self._replay(seal)
            self._wrote(before)
        except (OSError, errors.FormatError) as exc:
            raise _stopped(self.folder, exc) from exc

    def _refuse_altered(self, held: HeldVersion) -> None:
        if self._map_if_altered():
            self._journal.clear()
            raise errors.PoisonedError(
                f"{self.folder}: another process changed its weights files while version "
                f"{held.version} was staged; nothing was written",
                version=held.version,
            )

    def _recover(self) -> None:
        try:
            seal = self._journal.pending()
            if seal is not None:
                self._replay(seal)
        except (errors.FormatError, FileNotFoundError) as exc:
            logger.warning("%s: an interrupted swap cannot be finished: %s", self.folder, exc)
        except OSError as exc:
            raise _stopped(self.folder, exc) from exc
        self._journal.clear()

    def _replay(self, seal: Seal) -> None:
        """Write the journal into the files, then record the version, then remove the journal."""
        self._remember(seal.held.chain, None)
        for delta in self._journal.read(seal):
            if self._specs.get(delta.spec.name) != delta.spec or not delta.absolute.all():
                raise errors.MalformedError(f"{self.folder}: its journal is of another model")
            for place in self._live.get(delta.spec.name, ()):
                place.put(delta.indices, delta.values, delta.start)
        for file in self._files():
            checkpoints.sync(file)
        self._remember(seal.held.chain, seal.held)
        self._journal.clear()

    def _remember(self, chain: str, held: HeldVersion | None) -> None:
        checkpoints.write_atomic(
            self.folder / checkpoints.HELD_FILE, dump(HeldFile(chain=chain, held=held))
        )

    def _is_alone(self) -> bool:
        """Return whether all weights are in the one file that this target made."""
        made = self.folder / checkpoints.weights_file(self._specs)
        is_ours = (self.folder / checkpoints.HELD_FILE).exists()
        return is_ours and list(self.folder.glob("*.safetensors")) == [made]

    def _files(self) -> list[Path]:
        return sorted({place.file for live in self._live.values() for place in live})

    def _map(self) -> None:
        """Map every tensor of the chain in the folder's files, tied ones at every place."""
        if not any(self.folder.glob("*.safetensors")):
            self._live = {}
            return
        try:
            checkpoint = checkpoints.Checkpoint(self.folder)
        except errors.FormatError as exc:
            if not self._is_alone():
                raise
            logger.warning("%s: its weights are written anew, since %s", self.folder, exc)
            self._live = {}
            return
        for file in checkpoint.paths:
            if _is_shared(file):
                check_room(file.parent, file.stat().st_size)
                with checkpoints.creating(file) as copy:
                    shutil.copyfile(file, copy)
                    shutil.copymode(file, copy)
            fill_holes(file)  # on an in-memory file system, even reading a hole takes space
        live = {}
        for name, spec in self._specs.items():
            names = [name, *(alias for alias, of in self._aliases.items() if of == name)]
            found = [n for n in names if n in checkpoint.specs]
            live[name] = list(self._places(checkpoint, spec, found))
        self._live = live

    def _places(
        self, checkpoint: checkpoints.Checkpoint, spec: TensorSpec, names: list[str]
    ) -> Iterator[FileBits]:
        if not names:
            raise errors.TensorMismatchError(
                f"{self.folder} has no {spec.name!r}", tensor=spec.name
            )
        for name in names:
            check_spec(name, checkpoint.specs[name], self.folder, spec)
            yield FileBits(*checkpoint.place(name), spec)


def _is_shared(file: Path) -> bool:
    """Return whether backups by hard links (``cp -al``) or caches by symbolic links have a file."""
    return file.is_symlink() or file.stat().st_nlink > 1


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Convert errors of the operating system to an ``ApplyError``: followers try again on it."""
    try:
        yield
    except errors.DeltaChainError:  # some of its subclasses are OSErrors too
        raise
    except OSError as exc:
        message = f"{exc.filename or folder}: {exc.strerror or exc}"
        raise errors.ApplyError(message, hint=hint_for(exc, folder)) from exc


def _stopped(folder: Path, cause: Exception) -> errors.PoisonedError:
    return errors.PoisonedError(
        f"{folder}: writing stopped in the middle: {cause}",
        hint="open the folder again: its journal finishes the swap",
    )


class OwnFolder(FolderTarget):
    def bind(self, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> None:
        with explained(self.folder):
            within = chain_around(self.folder)
            if within is not None:
                raise errors.ConfigError(
                    f"{within} has a chain, which only its publisher may write to",
                    hint="name a folder beside the chain",
                )
            weights = [file.name for file in self.folder.glob("*.safetensors")]
            if weights and not (self.folder / checkpoints.HELD_FILE).is_file():
                raise errors.ConfigError(
                    f"{self.folder} has weights that are not from a chain ({min(weights)})",
                    hint="they may be the only copy; give a folder that is empty or not there yet",
                )
        super().bind(specs, aliases)

    def swap(self, prepared: Prepared, held: HeldVersion) -> float:
        self.refuse_other(held.chain)
        return super().swap(prepared, held)

    def refuse_other(self, chain: str) -> None:
        file = self.folder / checkpoints.HELD_FILE
        with explained(self.folder):
            if not file.is_file():
                return
            remembered = parse(file.read_bytes(), HeldFile, key=str(file))
        if remembered.chain != chain:
            raise errors.ChainMismatchError(
                f"{self.folder} holds a version of chain {remembered.chain}, "
                f"the chain at this URL is {chain}",
                hint="give another folder",
            )


def write_assets(chain: Chain, folder: Path, *, trusted: bool = False) -> list[str]:
    """Write the assets of a chain that the folder does not have; return the names written.

    Existing files are left alone, since a user may have edited them; a warning names files whose
    content differs. The configuration of an adapter is written beside one only: loaders that see it
    load the base it names instead of the weights.
    """
    written, kept = [], list[str]()
    refused = _refused(chain, folder)
    for name, data in chain.assets():
        file = folder / name
        if not checkpoints.is_asset(name) or name.lower() in refused:
            continue
        with explained(folder):
            if file.parent != folder and file.parent.is_symlink():
                continue
            if file.exists():
                kept += _difference(name, file, data)
                continue
            asset = without_remote_code(name, data, trusted=trusted, where=chain.store.url)
            if asset is not None:
                if file.parent != folder:
                    file.parent.mkdir(exist_ok=True)
                checkpoints.write_atomic(file, asset)
                written.append(name)
    if kept:
        _say_kept(folder, ", ".join(sorted(kept)))
    return written


def _refused(chain: Chain, folder: Path) -> set[str]:
    paths = asset_paths(chain.identity)
    if (
        checkpoints.weights_file((name for name, *_ in chain.table.tensors), paths)
        != checkpoints.ADAPTER_FILE
    ):
        return {checkpoints.ADAPTER_CONFIG}
    if (
        checkpoints.ADAPTER_CONFIG in paths and (folder / checkpoints.WEIGHTS_FILE).is_file()
    ):  # of an earlier release
        logger.warning(
            "%s: %s holds the adapter, and PEFT does not read that name: pull into a new folder",
            folder,
            checkpoints.WEIGHTS_FILE,
        )
        return {checkpoints.ADAPTER_CONFIG}
    return set()


def _difference(name: str, file: Path, data: bytes) -> list[str]:
    """Name a file with other content than the chain's, and the fields that differ in JSON."""
    own = file.read_bytes() if file.is_file() else data
    if own == data:
        return []
    if file.suffix != ".json":
        return [name]
    mine, theirs = fields(bare(own)), fields(bare(data))
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        return [name] if mine is None or mine != theirs else []
    found = [differing_fields(mine, theirs)]
    if mine.get(LIBRARY) != theirs.get(LIBRARY):
        found.append(repr(LIBRARY))  # which differing_fields leaves to a check of its own
    named = ", ".join(filter(None, found))
    return [f"{name} ({named})"] if named else []


@cache
def _say_kept(folder: Path, names: str) -> None:
    logger.warning(
        "%s has files that differ from the chain's, and are kept: %s; remove them to get the "
        "chain's",
        folder,
        names,
    )
