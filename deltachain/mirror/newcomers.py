"""Whether newcomers can join a mirror."""

from __future__ import annotations

from collections.abc import Collection

from deltachain.chain.chain import Chain
from deltachain.chain.reachable import plan_present
from deltachain.errors import BrokenChainError
from deltachain.types import Version


def check_newcomers(chain: Chain, version: Version, left_out: Collection[str]) -> None:
    """Check that newcomers can join a mirror.

    Args:
        chain: The chain in the mirror.
        version: Its newest version.
        left_out: Keys of payloads that the source did not have.

    Raises:
        BrokenChainError: They cannot.
    """
    try:
        plan_present(chain, None, chain.read(version))
    except BrokenChainError as exc:
        first = min(left_out, default="")
        gone = f": {len(left_out)} payloads are gone from the source, {first} first"
        raise BrokenChainError(
            f"no newcomer can join the mirror {chain.store.url} at version "
            f"{version}{gone if first else ''}",
            version=version,
            hint="what can be copied was copied; publish an anchor, and the mirror heals",
        ) from exc
