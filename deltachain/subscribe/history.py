"""What a target holds, and whether the chain in the store still is the one that led there."""

from __future__ import annotations

import logging

from deltachain.chain.chain import Chain, Committed
from deltachain.errors import BrokenChainError, ChainError, ForkedChainError
from deltachain.subscribe.targets.base import HeldVersion, Target
from deltachain.subscribe.watch import judge
from deltachain.types import Version

logger = logging.getLogger(__name__)


def held_by(chain: Chain, committed: Committed) -> HeldVersion:
    """What a target holds once it holds a committed version."""
    manifest = committed.manifest
    return HeldVersion(
        chain=chain.identity.chain,
        version=manifest.version,
        epoch=manifest.epoch,
        manifest=committed.digest,
        state=manifest.state,
    )


def identify(chain: Chain, target: Target, *, verify: bool) -> HeldVersion | None:
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


def check_history(chain: Chain, held: HeldVersion, committed: Committed) -> None:
    """Refuse a version that did not grow out of what is held.

    Raises:
        ForkedChainError: The history in the store is another one.
        StoreWentBackError: What is held is gone, and nothing newer is there.
        BrokenChainError: What is held is gone, and the version lies before it.
    """
    manifest = committed.manifest
    version = manifest.version
    if version < held.version:
        check_standing(chain, held)
        return
    if version == held.version:
        same = committed.digest == held.manifest
    elif version == held.version + 1:
        same = manifest.parent == held.manifest
    else:
        same = _grew_out_of(chain, held, committed)
    if not same:
        raise ForkedChainError(
            f"version {held.version} in the store is not the one that is held "
            f"(manifest {held.manifest})",
            version=held.version,
        )
    if manifest.epoch < held.epoch:
        raise ForkedChainError(
            f"version {version} is of epoch {manifest.epoch}, epoch {held.epoch} is held",
            version=version,
        )


def is_past(chain: Chain, held: HeldVersion, version: Version, manifest: str) -> bool:
    """Whether what is held, no older than a version that was announced, grew out of that.

    Args:
        chain: The chain.
        held: What is held.
        version: What was announced.
        manifest: The digest of its manifest.

    Raises:
        ForkedChainError: The version is another one in this store, or what is held is.
        StoreWentBackError: What is held is gone.
    """
    if held.version == version and held.manifest == manifest:
        return True
    there = chain.find(version)
    if there is not None and there.digest != manifest:
        raise ForkedChainError(
            f"version {version} in the store has manifest {there.digest}, {manifest} was announced",
            version=version,
        )
    check_standing(chain, held)
    return there is not None and held.version > version


def check_standing(chain: Chain, held: HeldVersion) -> None:
    """Refuse a store where what is held is not committed.

    Raises:
        DeltaChainError: What :func:`judge` says of it.
    """
    finding = judge(held, chain.look_back(held.version), chain.store.url)
    if isinstance(finding, BrokenChainError) and finding.version != held.version:
        return  # what is held is there
    if finding is not None:
        raise finding


def _grew_out_of(chain: Chain, held: HeldVersion, committed: Committed) -> bool:
    """Whether a later version has what is held in its past, as far as that can be told."""
    there = chain.find(held.version)
    if there is not None:
        return there.digest == held.manifest
    following = chain.find(held.version + 1)
    if following is not None:
        return following.manifest.parent == held.manifest
    states = {e.state for e in committed.manifest.recent if e.version == held.version}
    logger.warning(
        "manifest of version %d, which is held, is missing; %d is there%s",
        held.version,
        committed.version,
        "" if states else ", and nothing tells whether it grew out of that",
    )
    return states <= {held.state}


def require(
    chain: Chain, version: Version | Committed | None, held: HeldVersion | None = None
) -> Committed:
    """The manifest of a version, or of the head; one that was read already as it is.

    Args:
        chain: The chain.
        version: Which; the head when not given.
        held: What must be in the same chain, if anything is held.

    Raises:
        ObjectNotFoundError: The whole chain is gone.
        BrokenChainError: It is not there although later ones are.
        StoreWentBackError: What is held is gone as well.
        ChainError: It is not committed.
    """
    if isinstance(version, Committed):
        return version
    committed = chain.head() if version is None else chain.find(version)
    if committed is not None:
        return committed
    head = chain.head()
    if held is not None and (head is None or head.version < held.version):
        check_standing(chain, held)
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
