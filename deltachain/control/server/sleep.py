"""What a replica is between its engine's sleep and the proof of what it woke with."""

from __future__ import annotations

from deltachain.replica.leader import Leader


def fall_asleep(leader: Leader, kinds: frozenset[str]) -> None:
    """Be unready from here on, once a swap that is under way has ended.

    Args:
        leader: Of the engine that is about to release memory.
        kinds: Of that memory, as the engine calls them.
    """
    with leader.subscriber.alone():
        leader.released |= kinds


def wake_up(leader: Leader, kinds: frozenset[str], weights: str) -> None:
    """Be ready again once weights that came back are proven, or healed.

    Args:
        leader: Of the engine that has taken memory back.
        kinds: Of that memory.
        weights: What the engine calls weights.

    Raises:
        DeltaChainError: They could be neither: the replica is then poisoned.
    """
    try:
        if weights in kinds & leader.released:
            leader.scrub()
    finally:
        leader.released -= kinds
