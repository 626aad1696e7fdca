"""History checks: the version a target holds, and its place in the chain of the store."""

import logging

from deltachain import errors
from deltachain.chain.ancestry import missing_manifest
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.heartbeat import check_age
from deltachain.chain.identity import lost_chain, replaced
from deltachain.chain.manifests import Standing
from deltachain.format.keys import CHAIN_KEY
from deltachain.setting_types import whole
from deltachain.subscribe.targets.base import HeldVersion, Target
from deltachain.types import Version

# A store may be restored from an older copy, lose objects or be taken over by another chain without
# any error when polled: it just has nothing new. A finding counts once a second check, in a later
# iteration, confirms it.


def find_mismatch(held: HeldVersion, found: Standing, url: str) -> errors.DeltaChainError | None:
    if found.chain is None:
        return lost_chain(url)
    if found.chain != held.chain:
        held_one = f"version {held.version} of {held.chain} is held"
        return replaced(url, found.chain, held_one, held.version)
    if found.manifest is None:
        return _gone(held, found, url)
    if found.manifest != held.manifest:
        return errors.ForkedChainError(
            f"version {held.version} in the store differs from the held one: its manifest is "
            f"{found.manifest}, expected {held.manifest}",
            version=held.version,
        )
    if found.newest is not None and found.newest > held.version:
        return missing_manifest(held.version + 1, found.newest)
    return None


def _gone(held: HeldVersion, found: Standing, url: str) -> errors.DeltaChainError:
    newest = found.newest
    if newest is not None and newest > held.version:
        return missing_manifest(held.version, newest)
    there = "none is there" if newest is None else f"the newest there is {newest}"
    if found.lags:
        return errors.MirrorLagsError(
            f"the mirror lags: version {held.version} is held, {there} at {url}",
            version=held.version,
        )
    back = "" if newest is None else f" (`rollback` to {newest}, then `release`)"
    return errors.StoreWentBackError(
        f"the store went back: version {held.version} is held, {there} at {url}",
        version=held.version,
        hint=f"{errors.StoreWentBackError.default_hint}{back}. Of a mirror that is behind what is "
        "held, set DELTACHAIN_MIRROR=1",
    )


class Watch:
    """Findings of the checks of the held version; ``doubt``: why it may not be the chain's."""

    def __init__(self) -> None:
        self.doubt: errors.DeltaChainError | None = None
        self._proven = ""
        self._suspected = ""

    def proved(self, held: HeldVersion) -> None:
        self.doubt, self._proven, self._suspected = None, held.manifest, ""

    def is_open(self, held: HeldVersion) -> bool:
        return self._proven != held.manifest or bool(self._suspected)

    def ended(self, exc: errors.DeltaChainError) -> None:
        """Keep the finding that ended the follow loop, until an operator resolves it."""
        if isinstance(exc, errors.ChainError):
            self.doubt = exc

    def look(self, chain: Chain, held: HeldVersion) -> bool:
        """Check a held version in the store; return whether it was found.

        If not, the next check decides: two consecutive ones with the same finding raise it. Another
        version in its place, a ``ForkedChainError``, is raised at once.
        """
        finding = find_mismatch(held, chain.look_back(held.version), chain.store.url)
        if finding is None:
            self.proved(held)
            return True
        if self.note(finding, held):
            raise finding
        return False

    def note(self, finding: errors.DeltaChainError, held: HeldVersion) -> bool:
        """Record a finding; return whether it is confirmed."""
        suspected = f"{type(finding).__name__} {getattr(finding, 'version', '')}"
        counts = isinstance(finding, errors.ForkedChainError) or self._suspected == suspected
        self._suspected = suspected
        ahead = isinstance(finding, errors.BrokenChainError) and finding.version != held.version
        if ahead:
            self._proven, self.doubt = held.manifest, None  # the held version is in the store
        elif counts and not isinstance(finding, errors.MirrorLagsError):
            self.doubt = finding
        return counts


logger = logging.getLogger(__name__)


def held_by(chain: Chain, committed: Committed) -> HeldVersion:
    manifest = committed.manifest
    return HeldVersion(
        chain=chain.identity.chain,
        version=manifest.version,
        epoch=manifest.epoch,
        manifest=committed.digest,
        state=manifest.state,
    )


def identify(chain: Chain, target: Target, *, verify: bool) -> HeldVersion | None:
    """Find the version that a target holds; ``None`` if it holds none of the chain.

    The target's own record counts if it names this chain and, with ``verify``, its bits have the
    recorded state digest. Otherwise the state digest of its bits is looked up in the chain.
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
        logger.warning("the target does not hold the recorded version %d", held.version)
    found = chain.find_state(state)
    return held_by(chain, found) if found else None


def check_history(chain: Chain, held: HeldVersion, committed: Committed) -> None:
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
        raise errors.ForkedChainError(
            f"version {held.version} in the store differs from the held one "
            f"(manifest {held.manifest})",
            version=held.version,
        )
    if manifest.epoch < held.epoch:
        raise errors.ForkedChainError(
            f"version {version} is of epoch {manifest.epoch}, older than the held {held.epoch}",
            version=version,
        )


def is_past(chain: Chain, held: HeldVersion, version: Version, manifest: str) -> bool:
    """Return whether the held version, not older than an announced one, is or descends from it."""
    if held.version == version and held.manifest == manifest:
        return True
    there = chain.find(version)
    if there is not None and there.digest != manifest:
        raise errors.ForkedChainError(
            f"version {version} in the store has manifest {there.digest}, announced was {manifest}",
            version=version,
        )
    check_standing(chain, held)
    return there is not None and held.version > version


def check_standing(chain: Chain, held: HeldVersion) -> None:
    finding = find_mismatch(held, chain.look_back(held.version), chain.store.url)
    if isinstance(finding, errors.BrokenChainError) and finding.version != held.version:
        return  # the held version is in the store
    if finding is not None:
        raise finding


def _grew_out_of(chain: Chain, held: HeldVersion, committed: Committed) -> bool:
    """Return whether a later version descends from the held one, as far as states tell."""
    there = chain.find(held.version)
    if there is not None:
        return there.digest == held.manifest
    following = chain.find(held.version + 1)
    if following is not None:
        return following.manifest.parent == held.manifest
    states = {e.state for e in committed.manifest.recent if e.version == held.version}
    logger.warning(
        "manifest of the held version %d is missing, although version %d exists%s",
        held.version,
        committed.version,
        "" if states else "; no listed state tells whether it descends from the held one",
    )
    return states <= {held.state}


def require(
    chain: Chain, version: Version | Committed | None, held: HeldVersion | None = None
) -> Committed:
    if isinstance(version, Committed):
        return version
    committed = chain.head() if version is None else chain.find(whole("version", version))
    if committed is not None:
        if version is None:
            check_age(chain, committed)
        return committed
    head = chain.head()
    if held is not None and (head is None or head.version < held.version):
        check_standing(chain, held)
    if head is None:
        if chain.store.find(CHAIN_KEY) is None:
            raise lost_chain(chain.store.url)
        raise errors.no_version(chain.store.url)
    if version is not None and version < head.version:
        raise errors.BrokenChainError(
            f"manifest of version {version} is missing, head is {head.version}",
            version=version,
            hint="manifests must never be deleted: it was removed from the store",
        )
    raise errors.ChainError(
        f"version {version} is not committed, head is {head.version}",
        version=version,
        hint="name a version up to the head, or wait until it is committed",
    )
