"""Chains and replicas for tests of the dashboard."""

from typing import Any

from deltachain.chain.chain import Chain
from deltachain.status import Status
from deltachain.store import MemoryStore, Store
from spaces.dashboard.chain_index import ChainIndex, ChainView
from spaces.dashboard.watcher import ReplicaReport, answered
from tests.unit.control.replicas import status as ready_status
from tests.unit.manifest_chains import create, extend

NOW = 1_000_000.0
"""Time of the last look at the chain."""

ENGINE = "http://replica:8000"


def chain_of(count: int, store: Store | None = None) -> Chain:
    chain = create(MemoryStore() if store is None else store)
    extend(chain, count)
    chain.write_head(count - 1, ())
    return chain


def view_of(chain: Chain) -> ChainView:
    return ChainIndex(chain.store).refresh(NOW)


def status(made: Chain, version: int | None, **changes: Any) -> Status:
    """The answer of a replica that holds a version, and sees the newest one, as all is well."""
    newest = made.newest(0)
    found = None if version is None else made.find(version)
    here: dict[str, Any] = {
        "url": made.store.url,
        "chain": "one",
        "head": newest,
        "lag_versions": None,
        "manifest": found.digest if found else None,
    }
    return ready_status(version, **here | changes)


def report(made: Chain, version: int | None, **changes: Any) -> ReplicaReport:
    return answered(ENGINE, status(made, version, **changes), NOW - 1)
