"""Healing: give newcomers a way again after payloads were lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.reachable import is_reachable, plan_present
from deltachain.checkpoint import Checkpoint
from deltachain.codec import Change
from deltachain.delta import TensorDelta
from deltachain.errors import (
    BrokenChainError,
    ConfigError,
    FormatError,
    MalformedError,
    ObjectNotFoundError,
)
from deltachain.format.digest import digest_key
from deltachain.format.documents import EdgeSummary
from deltachain.kernels import host
from deltachain.maintain.added_edges import recorded_anchor, restore_anchor, upload_anchor
from deltachain.types import StateDigest, TensorSpec, check_spec


def heal(chain: Chain, head: Committed, copy: Path | None) -> EdgeSummary | None:
    """Add an anchor from a copy of the weights, if newcomers cannot reach the head.

    Args:
        chain: The chain.
        head: The newest version.
        copy: Folder that follows the chain, such as one of ``deltachain follow``; ``None`` for
            none.

    Returns:
        The anchor; ``None`` if newcomers have a way.

    Raises:
        BrokenChainError: There is no copy, the copy does not lead to the head either, or its
            version's anchor is recorded with parts of other bytes.
        ChainError: The version of the copy is pruned.
        TensorMismatchError: The copy is not the model of the chain.
    """
    if is_reachable(chain, head.version):
        return None
    lost = _lost_object(chain, head)
    what = f"newcomers cannot reach version {head.version}: {lost}"
    if copy is None:
        raise BrokenChainError(
            f"{what}, and no copy of the weights is known",
            version=head.version,
            hint="name a folder that follows this chain as --copy, or restart the publisher, which "
            "adds an anchor",
        )
    specs, checkpoint = chain.table.specs(), Checkpoint(copy)
    for spec in specs:
        check_spec(spec.name, checkpoint.specs.get(spec.name), copy, spec)
    keys = {spec.name: digest_key(spec) for spec in specs}
    digests = {name: host.digest(key, checkpoint.bits(name)) for name, key in keys.items()}
    state = sum(digests.values(), StateDigest())
    held = head if head.state == state else chain.find_state(state)
    if held is None:
        raise BrokenChainError(
            f"{what}, and {copy} holds no version of this chain",
            version=head.version,
            hint="let `deltachain follow` keep that folder at the head",
        )
    plan_present(chain, held.version, head)
    changes = _proven(checkpoint, specs, held)
    try:
        recorded_anchor(chain, held)
    except BrokenChainError:
        return restore_anchor(chain, held, changes)
    return upload_anchor(chain, held, changes)


def _proven(
    checkpoint: Checkpoint, specs: Iterable[TensorSpec], held: Committed
) -> Iterator[Change]:
    """Yield the bits of a copy, which may change while it is read.

    Raises:
        BrokenChainError: It did, or its bits are not those of the version, seen at the end.
    """
    changed = BrokenChainError(
        f"{checkpoint.path} changed while it was read, and is not version {held.version} now",
        version=held.version,
        hint="run this again, or stop `deltachain follow` meanwhile",
    )
    total = StateDigest()
    for spec in specs:
        try:
            bits = checkpoint.bits(spec.name)
        except (ConfigError, MalformedError) as exc:
            raise changed from exc
        change = Change(TensorDelta.dense(spec, bits), host.digest(digest_key(spec), bits))
        total += change.digest
        yield change
    if total != held.state:
        raise changed


def _lost_object(chain: Chain, head: Committed) -> str:
    """Name a lost object on the cheapest way from nothing, for a message."""
    try:
        plan = chain.plan(None, head)
        parts = [part.key for edge in plan.edges for part in chain.edge(edge, head).parts]
    except BrokenChainError as exc:
        return str(exc.args[0])
    except (ObjectNotFoundError, FormatError) as exc:
        return f"{exc.key} is gone"
    found = chain.store.find_all(parts)
    lost = next((key for key in parts if key not in found), "an object")
    return f"{lost} is gone, deleted by a lifecycle rule or a user"
