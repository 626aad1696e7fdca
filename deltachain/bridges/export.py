"""Export: each version of a chain as files that another system's receivers read.

A record in their folder names the chain and the last written version. A restart continues from the
bits of that version in the chain; if they cannot be reached, it writes a full version.
"""

import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec
import numpy as np

from deltachain import errors
from deltachain.bridges.dialect import Dialect, ElementChange, HostModel, Objects
from deltachain.chain.fetch import Fetched
from deltachain.checkpoint import sync_folder
from deltachain.delta import Piece
from deltachain.format.documents import Struct, decode
from deltachain.remote_code import without_remote_code
from deltachain.store import FileStore, Store
from deltachain.subscribe import HeldVersion, Subscriber
from deltachain.subscribe.targets.base import PatchedTarget, Write, write_all
from deltachain.subscribe.targets.tensor_patch import Patch, WholeTensor, prepare, state_of
from deltachain.types import Bits, StateDigest, TensorSpec, Version

logger = logging.getLogger(__name__)

RECORD: Final = "deltachain.json"
_PART: Final = ".part"  # folder of a version that is being written; no system's name begins so


class Exported(Struct, frozen=True, kw_only=True):
    """A version in the files of a dialect."""

    chain: str
    dialect: str
    version: Version
    number: int  # of the version in the files
    full: bool
    key: str  # of the object written last
    nbytes: int


class HostCopy(PatchedTarget):
    """The weights of a version on the host, and what the last swap changed."""

    def __init__(self) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self.live: dict[str, WholeTensor] = {}
        self.changes: list[ElementChange] = []
        self._held: HeldVersion | None = None

    def bind(self, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> None:
        del aliases  # a checkpoint has tied tensors once
        self.specs = dict(specs)
        self.live = {n: WholeTensor(np.zeros(s.numel, s.bits_dtype)) for n, s in specs.items()}

    def held(self) -> HeldVersion | None:
        return self._held

    def state(self) -> StateDigest | None:
        if self._held is None:
            return None
        return sum((state_of(self.specs[n], one) for n, one in self.live.items()), StateDigest())

    def patches(self, fetched: Fetched, piece: Piece, *, base_too: bool | None) -> Iterator[Patch]:
        name = piece.spec.name
        delta = fetched.read(name, partial(self.bits, name))
        yield prepare(self.live[name], delta, base_too=base_too)

    def bits(self, name: str) -> Bits:
        return np.asarray(self.live[name].storage)

    def close(self) -> None:
        """Do nothing: the weights are memory alone."""

    def write(self, patches: Iterable[Patch], held: HeldVersion) -> None:
        self.changes, before, self._held = [], self._held, None
        try:
            write_all(map(self._noted, patches), held.version)
        except errors.PartialApplyError:
            self._held = before
            raise
        self._held = held

    def _noted(self, patch: Patch) -> Write:
        live, new = self.bits(patch.spec.name), np.asarray(patch.new).reshape(-1)
        where = np.arange(new.size) if patch.indices is None else np.asarray(patch.indices)
        changed = np.flatnonzero(live[where] != new)
        changed = changed[np.argsort(where[changed], kind="stable")]
        indices = where[changed]
        self.changes.append(ElementChange(patch.spec, indices, live[indices], new[changed]))
        return Write(patch, [self.live[patch.spec.name]])


class Exporter:
    """Writes the versions that a subscriber reaches; its target is a ``HostCopy``.

    Args:
        subscriber: Subscriber of the chain, which holds no version yet.
        out: Store of the files.
        dialect: Name of the layout, and the layout.
        full_every: Write a full version in place of changes this often, for receivers that join
            late; 0 for the first one only.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        out: Store,
        dialect: tuple[str, Dialect],
        *,
        full_every: int = 0,
    ) -> None:
        if not isinstance(subscriber.target, HostCopy):
            raise TypeError(f"the target is a {type(subscriber.target).__name__}, not a HostCopy")
        self._name, self._dialect = dialect
        if full_every and self._dialect.counts:
            raise errors.ConfigError(
                f"{self._name} has no full versions but its base",
                hint="leave --full-every out; a new receiver reads all changes since the base",
            )
        self._subscriber, self._target, self._out = subscriber, subscriber.target, out
        self._every = full_every
        self.last = self._resume()

    def _resume(self) -> Exported | None:
        """Return what was written last, if the chain still leads there; the target then holds it.

        Raises:
            ChainMismatchError: The folder has the files of another chain, or another dialect.
            BrokenChainError: Nothing leads there, and the dialect cannot start over.
        """
        try:
            data = self._out.get(RECORD)
        except errors.ObjectNotFoundError:
            return None
        try:
            last = decode(data, Exported)
        except msgspec.MsgspecError as exc:
            raise errors.MalformedError(f"{RECORD} in {self._out.url}: {exc}", key=RECORD) from exc
        mine = self._subscriber.chain.identity.chain, self._name
        if (last.chain, last.dialect) != mine:
            raise errors.ChainMismatchError(
                f"{self._out.url} has chain {last.chain} for {last.dialect}, expected {mine[0]} "
                f"for {mine[1]}",
                hint="export into a new folder",
            )
        try:
            self._subscriber.update(last.version)
        except (errors.BrokenChainError, errors.ObjectNotFoundError) as exc:
            if self._dialect.counts:
                exc.hint = f"{self._name} needs every version: export into a new folder"
                raise
            logger.warning("version %d is gone, starting over: %s", last.version, exc.args[0])
            return None
        return last

    def write(self, version: Version) -> Exported:
        """Write the version that the target holds, and then the record."""
        last, target = self.last, self._target
        number = version
        if self._dialect.counts:
            number = 0 if last is None else last.number + 1
        follows = last is not None and number == last.number + 1
        is_due = bool(self._every and version % self._every == 0)
        model, objects = HostModel(target.specs, target.bits), None
        if follows and not is_due:
            objects = self._dialect.delta(number, model, target.changes)
        full = objects is None
        if objects is None:
            objects = self._dialect.full(number, replace(model, assets=self._assets()))
        key, nbytes = self._put(objects)
        self.last = Exported(
            chain=self._subscriber.chain.identity.chain,
            dialect=self._name,
            version=version,
            number=number,
            full=full,
            key=key,
            nbytes=nbytes,
        )
        self._out.put(RECORD, msgspec.json.encode(self.last))
        return self.last

    def _assets(self) -> dict[str, bytes]:
        chain, kept = self._subscriber.chain, dict[str, bytes]()
        for name, data in chain.assets():
            asset = without_remote_code(name, data, trusted=False, where=chain.store.url)
            if asset is not None:
                kept[name] = asset
        return kept

    def _put(self, objects: Objects) -> tuple[str, int]:
        """Write objects in order; on a disk, a folder of them appears whole.

        Receivers of some systems take a folder without an index for a full checkpoint.
        """
        out, key, nbytes = self._out, "", 0
        root = out.root if isinstance(out, FileStore) and not self._dialect.shares_folders else None
        if root is not None:
            shutil.rmtree(root / _PART, ignore_errors=True)
            out = FileStore(root / _PART)
        for key, data in objects:
            out.put(key, data)
            nbytes += len(data)
        if root is not None:
            folder = key.partition("/")[0]
            if self.last is None and (root / folder).exists():
                shutil.rmtree(root / _PART)
                raise errors.ConfigError(
                    f"{root / folder} is there already, and no {RECORD} names it",
                    hint="export into a new folder, or remove it",
                )
            shutil.rmtree(root / folder, ignore_errors=True)  # of a write that the record missed
            (root / _PART / folder).rename(root / folder)
            (root / _PART).rmdir()
            sync_folder(root)
        return key, nbytes
