"""Revert: commit a version that has the state of an older one, so that every replica goes back.

The version is a delta from the head with parts under its own number, so that a replica that is
restarted reaches the old state too. Head and older version are rebuilt tensor by tensor and proven
before the commit. Its epoch is one higher than the head's: a publisher at work is fenced.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from typing_extensions import override

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.fetch import Fetched, fetching
from deltachain.chain.plan import Plan
from deltachain.chain.reachable import check_write_access, plan_present
from deltachain.chain.upload import EdgeKeys, EdgeUpload
from deltachain.codec import ENCODINGS, Change
from deltachain.codec.encodings import Encoding
from deltachain.delta import TensorDelta
from deltachain.errors import (
    BrokenChainError,
    ChainError,
    ConfigError,
    DigestMismatchError,
    PublisherFencedError,
)
from deltachain.format.documents import Edge, revert_mark, reverted_to
from deltachain.format.keys import digest_key, manifest_key
from deltachain.kernels import host
from deltachain.kernels.move import digest_change
from deltachain.kernels.reference import Changes
from deltachain.publish.wire_form import sparse_change
from deltachain.publish.writer import Writer, in_new_epoch, newest, take_over
from deltachain.store import MemoryStore, Store
from deltachain.threads import Pool, cores
from deltachain.tracing import without_context
from deltachain.types import Bits, Buffer, StateDigest, TensorSpec, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBack:
    """One tensor of two versions.

    Attributes:
        spec: Spec of the tensor.
        changes: Changes from the newer version back to the older one.
        digest: Change of the state digest by these.
        older: Contribution of the older version's tensor to the state digest.
        change: The changes as input of a part; ``None`` if there are none.
    """

    spec: TensorSpec
    changes: Changes
    digest: StateDigest
    older: StateDigest
    change: Change | None = None


@contextmanager
def tensors_back(
    chain: Chain, older: Committed, newer: Committed, *, encoding: Encoding, base: Path | None
) -> Iterator[Iterator[TensorBack]]:
    """Fetch two versions, and yield how each tensor of the newer one becomes that of the older.

    The older version is rebuilt from nothing, the newer one from there or from nothing, whichever
    is cheaper. Pruned objects are used while they are there. At most two tensors a core are
    decoded ahead.

    Args:
        chain: The chain.
        older: The version to go back to.
        newer: The version to start from.
        encoding: Encoding of the changes.
        base: Local folder of the base checkpoint, if the chain starts from one.

    Raises:
        BrokenChainError: A version cannot be rebuilt from the store.
        ObjectNotFoundError: An object was deleted meanwhile.
        FormatError: An object is damaged.
    """
    plans = _plan(chain, None, older), _plan(chain, older.version, newer)
    with ExitStack() as stack:
        start = stack.enter_context(fetching(chain, plans[0], target=older, base=base, hold=False))
        onward = stack.enter_context(fetching(chain, plans[1], target=newer, base=base, hold=False))
        pool = stack.enter_context(Pool(cores()))
        moved = frozenset(onward.names)
        yield pool.ordered(
            lambda spec: _tensor(start, onward if spec.name in moved else None, spec, encoding),
            start.specs.values(),
            ahead=2 * cores(),
        )


def _plan(chain: Chain, held: Version | None, target: Committed) -> Plan:
    """Find a plan; with pruned edges, whose objects may still be there, if no other leads on."""
    try:
        return plan_present(chain, held, target)
    except BrokenChainError:
        if chain.prunes.names_edges:
            with suppress(BrokenChainError):
                return plan_present(chain, held, target, pruned=True)
        raise


def _tensor(
    start: Fetched, onward: Fetched | None, spec: TensorSpec, encoding: Encoding
) -> TensorBack:
    older = start.read(spec.name)
    if not older.is_dense:
        raise BrokenChainError(f"{spec.name}: the chain does not give the whole tensor")
    bits, digest = older.values, host.digest(digest_key(spec), older.values)
    if onward is None:
        nothing = Changes(np.empty(0, np.int64), bits[:0], bits[:0])
        return TensorBack(spec=spec, changes=nothing, digest=StateDigest(), older=digest)
    changes = _changes_back(bits, onward.read(spec.name, lambda: bits))
    back = TensorBack(
        spec=spec, changes=changes, digest=digest_change(spec, *changes), older=digest
    )
    if not changes.indices.size:
        return back
    change = sparse_change(back, lambda: bits, encoding=encoding, run=lambda: (bits, 0))
    return TensorBack(spec=spec, changes=changes, digest=back.digest, older=digest, change=change)


def _changes_back(older: Bits, delta: TensorDelta) -> Changes:
    """Return the changes that undo a delta of older bits; they are from new bits to old."""
    if delta.indices is None:
        return host.diff_(np.array(delta.values), older)
    old = older[delta.indices]
    new = delta.new_bits(old)
    differ = new != old
    return Changes(delta.indices[differ], new[differ], old[differ])


PART_NBYTES: Final = 512 << 20
"""Largest size of changes in one object before compression, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reverted:
    """Result of a revert, or what one would do.

    Attributes:
        goal: The older version.
        before: The head that the delta starts from.
        committed: The new version; ``None`` if nothing was committed.
        edge: The delta; ``None`` if the head has the state of the older version.
        nnz: Number of changed elements.
        tensors: Number of changed tensors.
    """

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
    """Commit a version with the state of an older one.

    Nothing is committed if the head has that state. Memory: the objects of the plan from nothing to
    the older version and of the plan from there to the head, as far as the store has no cheap
    ranges, and two tensors for each core.

    Args:
        chain: The chain.
        goal: The older version.
        encoding: Encoding of the delta.
        base: Local folder of the base checkpoint, if the chain starts from one.
        dry_run: Whether to compute the delta only, and write nothing.

    Raises:
        ConfigError: The store cannot decide races, so that only its publisher can go back; it is a
            mirror; or the chain is signed and there is no signing key.
        BrokenChainError: One of the versions cannot be rebuilt from the store.
        DigestMismatchError: One of them, rebuilt, has another state than its manifest says.
        PublisherFencedError: Another publisher took the chain over meanwhile.
    """
    check_write_access(chain)
    chosen, head = ENCODINGS.chosen(encoding), newest(chain)
    if head is None or head.version < goal.version:
        raise ChainError(
            f"version {goal.version} is not in {chain.store.url}", version=goal.version
        )
    if head.state == goal.state:
        return Reverted(goal=goal, before=head)
    settings = _Settings(chain, goal, chosen, base)
    if dry_run:
        return settings.measure(head)
    if not chain.store.capabilities.conditional_put:
        raise _undecided(chain, goal)
    writer = in_new_epoch(
        chain, head, numel=head.manifest.numel, metadata=without_context(goal.manifest.metadata)
    )
    try:
        return settings.commit(writer, head)
    except PublisherFencedError as exc:
        found = chain.find(head.version + 1)
        if found is None or found.manifest.epoch >= writer.epoch:
            exc.hint = "another publisher took the chain over meanwhile; if that is intended, wait "
            exc.hint += "until it is done, and revert again"
            raise
    # A publisher at work was faster: fence it first. What follows cannot fail for want of objects.
    taken = take_over(
        chain, numel=head.manifest.numel, metadata=without_context(goal.manifest.metadata)
    )
    if taken is None or taken.parent is None:
        raise BrokenChainError(f"{chain.store.url} lost its versions", version=head.version)
    return settings.commit(taken, taken.parent)


def check_reverted(head: Committed, state: StateDigest, *, goes_on: bool) -> None:
    """Refuse to continue a head that was reverted with other weights.

    Args:
        head: The newest version.
        state: State digest of the weights that a publisher starts with.
        goes_on: Whether the publisher was told to continue such a head.

    Raises:
        ChainError: The publisher would undo the revert.
    """
    goal = reverted_to(head.manifest)
    if goal is None or goes_on or state == head.state:
        return
    raise ChainError(
        f"version {head.version} was reverted to the state of version {goal}, and this publisher "
        "has other weights: it would undo that for every replica",
        version=head.version,
        hint=f"load the weights of version {goal} into the trainer (`deltachain pull URL --version "
        f"{goal}`); or, to go on with these weights, set PublishConfig(continue_reverted=True), "
        "or push with --continue-reverted",
    )


class _Discarding(MemoryStore):
    """A store that keeps nothing: the parts of a dry run are measured only."""

    @override
    def put(self, key: str, data: Buffer) -> str:
        del key, data
        return ""


@dataclass(frozen=True, slots=True)
class _Settings:
    """The chain, and what to do there."""

    chain: Chain
    goal: Committed
    encoding: Encoding
    base: Path | None

    def measure(self, head: Committed) -> Reverted:
        """Return what a revert of a head would do."""
        return self._upload(_Discarding(), head, head.manifest.epoch + 1, uuid.uuid4().hex)

    def commit(self, writer: Writer, head: Committed) -> Reverted:
        """Upload the delta from a head, and commit it.

        Raises:
            PublisherFencedError: Another publisher was first.
        """
        goal, commit_id = self.goal, uuid.uuid4().hex
        done = self._upload(self.chain.store, head, writer.epoch, commit_id)
        if done.edge is None:
            return done
        draft = writer.draft(
            commit_id,
            state=goal.state,
            step=goal.manifest.step,
            nnz=done.nnz,
            ext=revert_mark(goal.version),
        )
        committed = writer.commit(draft, done.edge)
        writer.close()
        return Reverted(
            goal=goal,
            before=head,
            committed=committed,
            edge=done.edge,
            nnz=done.nnz,
            tensors=done.tensors,
        )

    def _upload(self, store: Store, head: Committed, epoch: int, commit_id: str) -> Reverted:
        """Write the delta from a head; prove both states."""
        keys = EdgeKeys(kind="delta", version=head.version + 1, epoch=epoch, commit_id=commit_id)
        older = moved = StateDigest()
        nnz = tensors = 0
        raw = self.encoding.name == "raw"
        back = partial(tensors_back, encoding=self.encoding, base=self.base)
        with EdgeUpload(store, keys, raw=raw, part_nbytes=PART_NBYTES) as upload:
            with back(self.chain, self.goal, head) as found:
                for tensor in found:
                    older, moved = older + tensor.older, moved + tensor.digest
                    if tensor.change is not None:
                        upload.add(tensor.change)
                        nnz, tensors = nnz + tensor.changes.indices.size, tensors + 1
            _prove(self.goal, older)
            _prove(head, self.goal.state - moved)
            edge = upload.finish()
        return Reverted(goal=self.goal, before=head, edge=edge, nnz=nnz, tensors=tensors)


def _prove(committed: Committed, state: StateDigest) -> None:
    """Check that a rebuilt version has the state in its manifest."""
    if state != committed.state:
        key = manifest_key(committed.version)
        raise DigestMismatchError(
            f"version {committed.version}, rebuilt from the store, has another state than {key}",
            expected=str(committed.state),
            actual=str(state),
            key=key,
            hint="run `deltachain verify`; nothing was committed",
        )


def _undecided(chain: Chain, goal: Committed) -> ConfigError:
    """Build the error for a store in which a second writer is not refused by the store."""
    url = chain.store.url
    return ConfigError(
        f"{url} cannot decide between two writers (no put-if-absent), so that only the publisher "
        "at work there may go back",
        hint=f"load the weights of version {goal.version} into its trainer (`deltachain pull {url} "
        f"--version {goal.version} --out DIR`) and publish them; or stop it for good, and "
        f"`deltachain push DIR {url}`",
    )
