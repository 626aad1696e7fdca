"""Fetch and verify every object of a plan; decode tensors on demand.

Compressed parts stay in memory and are decoded tensor by tensor, so a plan of any length takes the
memory of its wire bytes plus a few tensors.
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
    "a lifecycle rule or a user removed it: restore it, or restart the publisher, "
    "whose next anchor makes it unnecessary"
)
"""Hint for a missing part without an alternative plan."""

THREADS: Final = 8
"""Objects fetched at a time: enough to fill a link with tens of milliseconds of latency."""


DECODERS: Final = min(4, os.cpu_count() or 1)
"""Tensors decoded at a time."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The objects of a plan, oldest first.

    Attributes:
        plan: The plan.
        specs: Tensors of the chain, by name.
        base: Checkpoint of a ``base`` edge; ``None`` for other plans.
        parts: All parts, in the order of the plan.
        nbytes: Fetched bytes.
        refetched: Keys of objects that were corrupt on the first read.
    """

    plan: Plan
    specs: Mapping[str, TensorSpec]
    base: Checkpoint | None
    parts: tuple[Part, ...]
    nbytes: int
    refetched: tuple[str, ...]

    @property
    def from_nothing(self) -> bool:
        """Whether the plan needs no base bits, so that every tensor decodes to dense bits."""
        return bool(self.plan.edges) and self.plan.edges[0].base is None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of changed tensors, in the order of the table."""
        if self.base is not None:
            return tuple(self.specs)
        touched = {name for part in self.parts for name in part.rows}
        return tuple(name for name in self.specs if name in touched)

    def read(self, name: str) -> TensorDelta:
        """Decode the delta of one tensor, folded over the whole plan."""
        deltas = [part.read(name) for part in self.parts if name in part.rows]
        if self.base is not None:
            deltas.insert(0, TensorDelta.dense(self.specs[name], self.base.bits(name)))
        return fold_all(deltas)

    def deltas(self) -> Iterator[TensorDelta]:
        """Yield the folded delta of each changed tensor in order, decoded ahead in threads.

        At most ``2 * DECODERS`` tensors are decoded ahead.
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
        """Compute the state digest that a plan from nothing leads to.

        Raises:
            BrokenChainError: A tensor is missing or not dense.
        """
        total = StateDigest()
        for name, spec in self.specs.items():
            delta = self.read(name) if name in self.names else None
            if delta is None or not delta.is_dense:
                raise BrokenChainError(f"{name}: the plan does not contain the whole tensor")
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
    """Fetch and verify every object of a plan.

    A corrupt object is fetched once more before it is refused.

    Args:
        chain: Chain of the plan.
        plan: The plan to fetch.
        target: Manifest of the plan's target version, if already read.
        base: Local folder of the base checkpoint, if the plan starts from it.
        progress: Called with the size of each fetched object, in bytes.

    Raises:
        ObjectNotFoundError: An object is gone; plan again.
        DigestMismatchError: An object does not have the digest recorded in the chain.
        MalformedError: An object has this digest but violates FORMAT.md.
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
    """Open the checkpoint of a base reference and verify the digests of its files.

    Args:
        reference: Base reference of the chain.
        folder: Local folder; the publisher's path if ``None``.

    Raises:
        ConfigError: The folder does not exist.
        DigestMismatchError: A file is missing or has another digest.
    """
    path = folder or Path(reference.path)
    hint = f"give the folder of the base checkpoint ({reference.repo or reference.path})"
    try:
        there = path.exists()
    except OSError as exc:  # a path that is invalid on this machine, such as one too long
        raise ConfigError(f"base checkpoint {str(path)[:80]!r}: {exc.strerror}", hint=hint) from exc
    if not there:
        raise ConfigError(f"base checkpoint {path} does not exist", hint=hint)
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
    """Fetch and verify a part, once more if it is corrupt."""
    try:
        return _open(_read(store, ref), ref)
    except UnsupportedFormatError:
        raise
    except FormatError:
        refetched.append(ref.key)
        return _open(_read(store, ref), ref)


def _read(store: Store, ref: ObjectRef) -> Buffer:
    try:
        return store.read(ref.key, nbytes=ref.nbytes, pin=ref.pin)
    except ObjectNotFoundError as exc:
        exc.hint = LOST
        raise


def _open(data: Buffer, ref: ObjectRef) -> Part:
    """Verify the digests of an object and open it as a part."""
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
