"""Engine sleep: a replica is unready until its weights are verified after the wake-up."""

from __future__ import annotations

from deltachain.replica.leader import Leader


def fall_asleep(leader: Leader, kinds: frozenset[str]) -> None:
    """Wait for a running swap, then mark the replica as unready.

    Args:
        leader: Leader of the engine that is about to release memory.
        kinds: Kinds of memory to be released, in the engine's terms.
    """
    with leader.subscriber.alone():
        leader.released |= kinds


def wake_up(leader: Leader, kinds: frozenset[str], weights: str) -> None:
    """Verify or heal restored weights, then mark the replica as ready.

    Args:
        leader: Leader of the engine that has allocated memory again.
        kinds: Kinds of allocated memory, in the engine's terms.
        weights: The engine's term for weights.

    Raises:
        DeltaChainError: Verification and healing failed; the replica is poisoned.
    """
    try:
        if weights in kinds & leader.released:
            leader.scrub()
    finally:
        leader.released -= kinds
