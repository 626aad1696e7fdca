"""Revert: commit a version that has the state of an older one, so that every replica goes back.

The version is a delta from the head with parts under its own number, so that a replica that is
restarted reaches the old state too. Its epoch is one higher than the head's: a publisher at work is
fenced. Needs no torch.
"""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from deltachain import errors
from deltachain.chain.chain import Chain, Committed, check_write_access, plan_present
from deltachain.chain.fetch import Fetched, fetching, scratch
from deltachain.chain.upload import EdgeKeys, EdgeUpload
from deltachain.codec import ENCODINGS
from deltachain.codec.encodings import Encoding
from deltachain.delta import WINDOW_NBYTES, pieces
from deltachain.format.documents import Edge, revert_mark, reverted_to
from deltachain.format.keys import manifest_key
from deltachain.kernels import host
from deltachain.kernels.arrays import Changes
from deltachain.kernels.protocol import digest_change
from deltachain.publish.wire_form import sparse_change
from deltachain.publish.writer import Writer, in_new_epoch, newest, take_over
from deltachain.store import MemoryStore, Store
from deltachain.types import Bits, StateDigest, TensorSpec

PART_NBYTES: Final = 64 << 20  # largest size of changes in one object before compression, in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reverted:
    """Result of a revert, or what one would do."""

    goal: Committed
    before: Committed
    committed: Committed | None = None
    edge: Edge | None = None
    nnz: int = 0
    tensors: int = 0


def revert(
    chain: Chain,
    goal: Committed,
    *,
    encoding: str = "step",
    base: Path | None = None,
    dry_run: bool = False,
) -> Reverted:
    """Commit a version with the state of an older one, unless the head has it.

    Both versions are rebuilt window by window, and proven before the commit.
    """
    check_write_access(chain)
    chosen, head = ENCODINGS.chosen(encoding), newest(chain)
    if head is None or head.version < goal.version:
        raise errors.ChainError(
            f"version {goal.version} is not in {chain.store.url}", version=goal.version
        )
    if head.state == goal.state:
        return Reverted(goal=goal, before=head)
    if not dry_run and not chain.store.capabilities.conditional_put:
        url, version = chain.store.url, goal.version
        raise errors.ConfigError(
            f"{url} cannot decide between two writers (no put-if-absent), so that only the "
            "publisher at work there may go back",
            hint=f"load the weights of version {version} into its trainer (`deltachain pull {url} "
            f"--version {version} --out DIR`) and publish them; or stop it for good, and "
            f"`deltachain push DIR {url}`",
        )
    with ExitStack() as reading:
        return _revert(chain, goal, head, chosen, base, reading, dry_run=dry_run)


def _revert(  # noqa: PLR0913 - what :func:`revert` found
    chain: Chain,
    goal: Committed,
    head: Committed,
    chosen: Encoding,
    base: Path | None,
    reading: ExitStack,
    *,
    dry_run: bool,
) -> Reverted:
    older, numel = reading.enter_context(_rebuilt(chain, goal, base)), head.manifest.numel
    metadata = goal.manifest.metadata
    writer: Writer | None = in_new_epoch(chain, head, numel=numel, metadata=metadata)
    while writer is not None and writer.parent is not None:
        head = writer.parent
        keys = EdgeKeys(
            kind="delta", version=head.version + 1, epoch=writer.epoch, commit_id=uuid.uuid4().hex
        )
        store = MemoryStore() if dry_run else chain.store
        with _rebuilt(chain, head, base) as newer:
            edge, nnz, tensors = _upload(store, keys, older, newer, chosen)
        found = Reverted(goal=goal, before=head, edge=edge, nnz=nnz, tensors=tensors)
        if dry_run:
            return found
        try:
            committed = writer.commit(
                edge,
                commit_id=keys.commit_id,
                state=goal.state,
                step=goal.manifest.step,
                nnz=nnz,
                ext=revert_mark(goal.version),
            )
            writer.close()
            return replace(found, committed=committed)
        except errors.PublisherFencedError as exc:
            other = chain.find(head.version + 1)
            if other is None or other.manifest.epoch >= writer.epoch:
                exc.hint = "another publisher took the chain over meanwhile; if that is intended, "
                exc.hint += "wait until it is done, and revert again"
                raise
        # A publisher at work was faster: fence it first.
        writer = take_over(chain, numel=numel, metadata=metadata)
    raise errors.BrokenChainError(f"{chain.store.url} lost its versions", version=head.version)


@contextmanager
def _rebuilt(chain: Chain, committed: Committed, base: Path | None) -> Iterator[Fetched]:
    """Rebuild a version, with pruned edges if no other plan leads there; prove its state."""
    try:
        plan = plan_present(chain, None, committed)
    except errors.BrokenChainError as error:
        if not chain.prunes.names_edges:
            raise
        try:
            plan = plan_present(chain, None, committed, pruned=True)
        except errors.BrokenChainError:
            raise error from None  # it says that the version was pruned
    with fetching(chain, plan, target=committed, base=base, hold=False, room=scratch()) as fetched:
        if (state := fetched.state()) != committed.state:
            key = manifest_key(committed.version)
            raise errors.DigestMismatchError(
                f"version {committed.version}, rebuilt from the store, has another state than "
                f"{key}",
                expected=str(committed.state),
                actual=str(state),
                key=key,
                hint="run `deltachain verify`; nothing was committed",
            )
        yield fetched


def _upload(
    store: Store, keys: EdgeKeys, older: Fetched, newer: Fetched, encoding: Encoding
) -> tuple[Edge, int, int]:
    nnz = tensors = 0
    with EdgeUpload(store, keys, raw=encoding.own_arrays, part_nbytes=PART_NBYTES) as upload:
        for spec in older.specs.values():

            def read(spec: TensorSpec = spec) -> Bits:
                return older.read(spec.name).values

            found = tuple(_changes(older, newer, spec))
            for changes in found:
                digest, whole = digest_change(spec, *changes), read if len(found) == 1 else None
                upload.add(
                    sparse_change(spec, changes, digest, whole, encoding=encoding, run=(read, 0))
                )
                nnz += changes.indices.size
            tensors += bool(found)
        return upload.finish(), nnz, tensors


def _changes(older: Fetched, newer: Fetched, spec: TensorSpec) -> Iterator[Changes]:
    """Yield what differs of a tensor, in parts if it is much."""
    plans, found, nbytes = [one.tensor_plan(spec.name) for one in (newer, older)], [], 0
    for _, low, high in pieces([spec], WINDOW_NBYTES):
        now, bits = (plan.read(low, high).within(low, high).values for plan in plans)
        one = host.diff_(np.array(now), bits)
        found += [one._replace(indices=one.indices + low)] if one.indices.size else []
        nbytes += sum(array.nbytes for array in one)
        if nbytes > PART_NBYTES:
            yield _joined(found)
            found, nbytes = [], 0
    if found:
        yield _joined(found)


def _joined(found: Sequence[Changes]) -> Changes:
    return Changes(*map(np.concatenate, zip(*found, strict=True)))


def check_reverted(head: Committed, state: StateDigest, *, goes_on: bool) -> None:
    goal = reverted_to(head.manifest)
    if goal is None or goes_on or state == head.state:
        return
    raise errors.ChainError(
        f"version {head.version} was reverted to the state of version {goal}, and this publisher "
        "has other weights: it would undo that for every replica",
        version=head.version,
        hint=f"load the weights of version {goal} into the trainer (`deltachain pull URL --version "
        f"{goal}`); or, to go on with these weights, set PublishConfig(continue_reverted=True), "
        "or push with --continue-reverted",
    )
