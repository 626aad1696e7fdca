"""The past of a chain, read back from its newest manifest: ways to a version, and its state."""

from __future__ import annotations

from collections.abc import Collection

from deltachain.errors import BrokenChainError
from deltachain.hint import read_hint
from deltachain.manifest import EdgeSummary
from deltachain.manifests import Committed, Manifests
from deltachain.plan import Plan, make_plan
from deltachain.store import Store
from deltachain.types import StateDigest, Version
from deltachain.window import covers, edge_id


class Past:
    """What the manifests of a chain tell of its past, each by its window.

    Args:
        store: Where the chain lies.
        manifests: Its manifests.
    """

    def __init__(self, store: Store, manifests: Manifests) -> None:
        self._store = store
        self._manifests = manifests

    def find_state(self, state: StateDigest, head: Committed | None) -> Committed | None:
        """The newest version that has a state; ``None`` when no version has."""
        committed = head
        while committed is not None:
            manifest = committed.manifest
            if committed.state == state:
                return committed
            states = {edge.version: edge.state for edge in manifest.recent}
            for version in sorted(states, reverse=True):
                if states[version] == str(state):
                    return self._manifests.read(version)
            if manifest.version == 0:
                return None
            committed = self._manifests.read(min(manifest.window_from, manifest.version - 1))
        return None

    def plan(
        self,
        held: Version | None,
        target: Committed,
        *,
        encodings: Collection[str],
        avoid: Collection[EdgeSummary],
    ) -> Plan:
        """The cheapest way from ``held`` to a committed version; see :func:`plan.make_plan`.

        Raises:
            BrokenChainError: No way leads there.
        """
        version = target.version
        later = self._manifests.find(version + 1)  # lists the anchor of this version, if it has one
        manifests = [later, target] if later else [target]
        edges = {edge_id(e): e for e in read_hint(self._store).anchors if e.version <= version}
        oldest = target.manifest
        while True:
            for committed in manifests:
                own = committed.manifest.summary()
                for edge in (*committed.manifest.recent, own):
                    if edge.version <= version:
                        edges[edge_id(edge)] = edge
            covered = covers(edges.values(), held, version, oldest.window_from)
            if covered or oldest.version == 0:
                try:
                    usable = [edge for edge in edges.values() if edge not in avoid]
                    return make_plan(held, version, usable, encodings=encodings)
                except BrokenChainError:
                    if oldest.version == 0:
                        raise
            manifests = [self._manifests.read(oldest.window_from)]
            oldest = manifests[0].manifest
