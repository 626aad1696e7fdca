"""Every object of a plan, fetched and proven, its tensors decoded on demand.

Compressed parts stay in memory and are decoded tensor by tensor, so that a plan of any length needs
the memory of its bytes on the wire and of one tensor.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.checks import check_encodings
from deltachain.chain.plan import Plan
from deltachain.checkpoint import Checkpoint
from deltachain.codec import Part
from deltachain.delta import TensorDelta, fold_all
from deltachain.errors import (
    BrokenChainError,
    ConfigError,
    DigestMismatchError,
    FormatError,
    MalformedError,
    ObjectNotFoundError,
    UnsupportedFormatError,
)
from deltachain.format.digest import digest_key, object_digest
from deltachain.format.documents import BaseRef, Edge, ObjectRef
from deltachain.kernels import host
from deltachain.store import Store
from deltachain.threads import Pool
from deltachain.types import Buffer, StateDigest, TensorSpec, mismatch

LOST: Final = (
    "a rule for old objects, or somebody, removed it: put it back; or start the publisher again, "
    "whose next anchor leads around it"
)
"""What to do about a part that is gone and that no other way leads around."""

THREADS: Final = 8
"""Objects fetched at a time: enough to fill a link whose latency is tens of milliseconds."""


DECODERS: Final = min(4, os.cpu_count() or 1)
"""Tensors decoded at a time."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The objects of a plan, oldest first.

    Attributes:
        plan: What was fetched.
        specs: The chain's tensors, by name.
        base: The checkpoint a ``base`` edge starts from.
        parts: Every part, in the order of the plan.
        nbytes: Bytes fetched.
        refetched: Objects that were corrupt at first.
    """

    plan: Plan
    specs: Mapping[str, TensorSpec]
    base: Checkpoint | None
    parts: tuple[Part, ...]
    nbytes: int
    refetched: tuple[str, ...]

    @property
    def from_nothing(self) -> bool:
        """Whether the plan needs no base bits: every tensor decodes to all of its elements."""
        return bool(self.plan.edges) and self.plan.edges[0].base is None

    @property
    def names(self) -> tuple[str, ...]:
        """Tensors that the plan touches, in the order of the table."""
        if self.base is not None:
            return tuple(self.specs)
        touched = {name for part in self.parts for name in part.rows}
        return tuple(name for name in self.specs if name in touched)

    def read(self, name: str) -> TensorDelta:
        """What the whole plan does to one tensor, folded."""
        deltas = [part.read(name) for part in self.parts if name in part.rows]
        if self.base is not None:
            deltas.insert(0, TensorDelta.dense(self.specs[name], self.base.bits(name)))
        return fold_all(deltas)

    def deltas(self) -> Iterator[TensorDelta]:
        """What the plan does to every tensor that it touches, in order, decoded ahead in threads.

        A few tensors are decoded at a time: as many as there are threads, and one more each.
        """
        with Pool(DECODERS) as pool:
            ahead: deque[Future[TensorDelta]] = deque()
            for name in self.names:
                ahead.append(pool.submit(self.read, name))
                if len(ahead) > 2 * DECODERS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def state(self) -> StateDigest:
        """State digest that a plan from nothing leads to, from its bytes alone.

        Raises:
            BrokenChainError: Some tensor is not given whole.
        """
        total = StateDigest()
        for name, spec in self.specs.items():
            delta = self.read(name) if name in self.names else None
            if delta is None or not delta.is_dense:
                raise BrokenChainError(f"{name}: the plan does not give the whole tensor")
            total += host.digest(digest_key(spec), delta.values)
        return total


def fetch(
    chain: Chain,
    plan: Plan,
    *,
    target: Committed | None = None,
    base: Path | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Fetched:
    """Fetch and prove every object of a plan.

    An object that is corrupt is fetched once more, and then refused.

    Args:
        chain: Where the plan was made.
        plan: What to fetch.
        target: The manifest of the version it leads to, if that was read already.
        base: Where the base checkpoint lies here, if the plan starts from it.
        progress: Called with the bytes of each object that arrived.

    Raises:
        ObjectNotFoundError: An object is gone; plan again.
        DigestMismatchError: An object is not the one that the chain names.
        MalformedError: It is that object, and violates FORMAT.md.
    """
    specs = {spec.name: spec for spec in chain.table.specs()}
    chain.look_ahead(plan)
    edges = [chain.edge(summary, target) for summary in plan.edges]
    refs = [(ref, edge) for edge in edges for ref in edge.parts]
    reference = edges[0].reference if edges else None
    checkpoint = None if reference is None else open_base(reference, base)
    if checkpoint is not None:
        path = str(checkpoint.path)
        _check_specs(specs, "the chain", checkpoint.specs, path, key=path)
    refetched: list[str] = []

    def get(item: tuple[ObjectRef, Edge]) -> Part:
        ref, edge = item
        part = _get(chain.store, ref, refetched)
        check_encodings(edge, (row.encoding for row in part.rows.values()), ref.key)
        rows = {name: row.spec for name, row in part.rows.items()}
        _check_specs(rows, ref.key, specs, "the chain", key=ref.key)
        progress(ref.nbytes)
        return part

    if len(refs) > 1:
        with Pool(min(THREADS, len(refs))) as pool:
            parts = tuple(pool.map(get, refs))
    else:
        parts = tuple(map(get, refs))
    return Fetched(plan, specs, checkpoint, parts, plan.nbytes, tuple(refetched))


def open_base(reference: BaseRef, folder: Path | None) -> Checkpoint:
    """Open the checkpoint that a base reference means, and prove its files.

    Args:
        reference: What the chain says of it.
        folder: Where it lies here; the publisher's own path when not given.

    Raises:
        ConfigError: It is not there.
        DigestMismatchError: A file is another one.
    """
    path = folder or Path(reference.path)
    hint = f"give the folder of the base checkpoint ({reference.repo or reference.path})"
    try:
        there = path.exists()
    except OSError as exc:  # a path of the chain that this machine cannot even look up
        raise ConfigError(f"base checkpoint {str(path)[:80]!r}: {exc.strerror}", hint=hint) from exc
    if not there:
        raise ConfigError(f"base checkpoint {path} is not there", hint=hint)
    checkpoint = Checkpoint(path)
    found = {ref.name: ref for ref in checkpoint.files()}
    for ref in reference.files:
        have = found.get(ref.name)
        if have != ref:
            raise DigestMismatchError(
                f"{path / ref.name}",
                expected=ref.blake3,
                actual=have.blake3 if have else "no such file",
                key=ref.name,
                hint=hint,
            )
    return checkpoint


def _get(store: Store, ref: ObjectRef, refetched: list[str]) -> Part:
    """One part, proven; fetched again if it is corrupt."""
    try:
        return _open(_read(store, ref), ref)
    except UnsupportedFormatError:
        raise
    except FormatError:
        refetched.append(ref.key)
        return _open(_read(store, ref), ref)


def _read(store: Store, ref: ObjectRef) -> Buffer:
    try:
        return store.read(ref.key, nbytes=ref.nbytes, xet_hash=ref.xet_hash)
    except ObjectNotFoundError as exc:
        exc.hint = LOST
        raise


def _open(data: Buffer, ref: ObjectRef) -> Part:
    """A part, once it is known to be the object that the reference names."""
    actual = object_digest(data)
    if actual != ref.blake3:
        raise DigestMismatchError(
            ref.key,
            expected=ref.blake3,
            actual=actual,
            key=ref.key,
        )
    part = Part.from_bytes(data, key=ref.key)
    if part.digest != ref.directory:
        raise DigestMismatchError(
            f"{ref.key}: directory", expected=ref.directory, actual=part.digest, key=ref.key
        )
    return part


def _check_specs(
    needed: Mapping[str, TensorSpec],
    where: str,
    known: Mapping[str, TensorSpec],
    there: str,
    *,
    key: str,
) -> None:
    """Check that every tensor is known under its name with this dtype and shape.

    Raises:
        MalformedError: One is not.
    """
    for name, spec in needed.items():
        if message := mismatch(name, spec, where, known.get(name), there):
            raise MalformedError(message, key=key)
