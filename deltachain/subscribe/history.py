"""What a target holds, and whether the chain in the store still is the one that led there."""

from __future__ import annotations

import logging

from deltachain.chain import Chain, Committed
from deltachain.errors import BrokenChainError, ChainError, ForkedChainError
from deltachain.subscribe.target import Held, Target
from deltachain.types import Version

logger = logging.getLogger(__name__)


def held_by(chain: Chain, committed: Committed) -> Held:
    """What a target holds once it holds a committed version."""
    manifest = committed.manifest
    return Held(
        chain=chain.identity.chain,
        version=manifest.version,
        epoch=manifest.epoch,
        manifest=committed.digest,
        state=manifest.state,
    )


def identify(chain: Chain, target: Target, *, verify: bool) -> Held | None:
    """Find out which version a target holds.

    What the target remembers counts if it is of this chain and, where asked for, its bits still
    have that state. Otherwise its bits are looked up among the states of the chain.

    Returns:
        ``None`` when it holds no version of the chain.
    """
    held = target.held()
    if held is not None and held.chain == chain.identity.chain and not verify:
        return held
    state = target.state()
    if state is None:
        return None
    if held is not None and held.chain == chain.identity.chain and held.state == str(state):
        return held
    if held is not None:
        logger.warning("the target does not hold version %d as it remembers", held.version)
    found = chain.find_state(state)
    return held_by(chain, found) if found else None


def check_history(chain: Chain, held: Held, committed: Committed) -> None:
    """Refuse a version that did not grow out of what is held.

    Raises:
        ForkedChainError: The history in the store is another one, or went back in time.
    """
    manifest = committed.manifest
    version = manifest.version
    if version == held.version + 1:
        same = manifest.parent == held.manifest
    else:
        there = chain.find(min(version, held.version))
        older = version < held.version
        same = there is not None and (older or there.digest == held.manifest)
    if not same:
        raise ForkedChainError(
            f"version {held.version} in the store is not the one that is held "
            f"(manifest {held.manifest})",
            version=held.version,
        )
    if version > held.version and manifest.epoch < held.epoch:
        raise ForkedChainError(
            f"version {version} is of epoch {manifest.epoch}, epoch {held.epoch} is held",
            version=version,
        )


def require(chain: Chain, version: Version | Committed | None) -> Committed:
    """The manifest of a version, or of the head; one that was read already as it is.

    Raises:
        ObjectNotFoundError: The whole chain is gone.
        BrokenChainError: It is not there although later ones are.
        ChainError: It is not committed.
    """
    if isinstance(version, Committed):
        return version
    committed = chain.head() if version is None else chain.find(version)
    if committed is not None:
        return committed
    head = chain.head()
    if head is None:
        chain.check_present()
        raise ChainError(
            f"{chain.store.url} has no version yet", hint="wait for the publisher's first commit"
        )
    if version is not None and version < head.version:
        raise BrokenChainError(
            f"manifest of version {version} is missing, head is {head.version}",
            version=version,
            hint="manifests are never deleted: somebody removed it from the store",
        )
    raise ChainError(f"version {version} is not committed, head is {head.version}", version=version)
