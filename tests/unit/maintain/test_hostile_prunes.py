"""Prune records that somebody else made: readers reach the head, and maintainers say who forged."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from deltachain.chain.chain import Chain, is_reachable
from deltachain.chain.trust import SigningKey, Trust, TrustedKeys
from deltachain.checkpoint import Checkpoint
from deltachain.errors import BrokenChainError, SignatureError
from deltachain.format.documents import PrunedKind, PrunedRange, PruneRecord, seal
from deltachain.format.keys import PAYLOADS, prune_key
from deltachain.maintain import KeepRule, Maintainer, Pruner
from deltachain.maintain.survey import Survey
from deltachain.store import MemoryStore, open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.values import present
from tests.unit.cli.support import invoke
from tests.unit.maintain.grown import SPECS, Grown

HEAD: Final = 59
SPANS: Final[tuple[tuple[PrunedKind, int], ...]] = (
    ("anchor", 0),
    ("delta", 1),
    ("skip", 8),
)


def everything(number: int = 0, *, after: float = 0.0) -> PruneRecord:
    """A record that names every edge of the chain."""
    rows = (PrunedRange(kind=k, span=n, first=0, last=HEAD, after=after) for k, n in SPANS)
    return PruneRecord(
        chain="c" * 32, number=number, head=HEAD, maintainer="x", time=0.0, pruned=tuple(rows)
    )


@pytest.fixture
def grown() -> Grown:
    made = Grown(MemoryStore())
    made.grow(HEAD + 1)
    Maintainer(made.chain, None).round()
    return made


def reached(grown: Grown, folder: Path, version: int) -> int:
    """Follow up to a version in a folder; the version held then."""
    with Subscriber(SubscribeConfig(url=grown.store.url), folder, store=grown.store) as subscriber:
        receipt = subscriber.update(version)
    held = Checkpoint(folder)
    for spec in SPECS:
        assert (held.bits(spec.name) == grown.bits[version][spec.name]).all()
    return receipt.version if receipt else version


def test_readers_reach_every_version_though_a_record_names_everything(
    grown: Grown, tmp_path: Path
) -> None:
    grown.store.put(prune_key(0), seal(everything()))
    chain = Chain.open(grown.store)
    with pytest.raises(BrokenChainError):
        chain.plan(None, chain.read(HEAD))  # what a proof of a way goes by
    plan = chain.plan(None, chain.read(HEAD), pruned=True)
    assert plan.edges[0].base is None
    for version in (3, 30):
        assert reached(grown, tmp_path / "follower", version) == version
    assert reached(grown, tmp_path / "follower", HEAD) == HEAD
    assert reached(grown, tmp_path / "newcomer", HEAD) == HEAD


def test_such_a_record_deletes_nothing_that_is_kept(
    grown: Grown, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = {info.key for prefix in PAYLOADS for info in grown.store.list(prefix)}
    grown.store.put(prune_key(0), seal(everything()))
    pruner = Pruner(Survey(Chain.open(grown.store)), KeepRule(), grace_s=0.0)
    for _ in range(2):
        pruner.run()
    assert {info.key for prefix in PAYLOADS for info in grown.store.list(prefix)} == before
    assert "restart the publisher, which adds an anchor" in caplog.text
    assert reached(grown, tmp_path / "newcomer", HEAD) == HEAD


def test_a_record_that_names_everything_is_taken_back_while_its_time_has_not_come(
    grown: Grown,
) -> None:
    grown.store.put(prune_key(0), seal(everything(after=1e18)))
    Pruner(Survey(Chain.open(grown.store)), KeepRule()).run()
    chain = Chain.open(grown.store)
    newest = present(chain.prunes.newest())
    assert (newest.number, newest.pruned) == (1, ())
    assert is_reachable(chain, HEAD)


@pytest.mark.parametrize("lost", ["objects", "all"])
def test_a_version_that_is_pruned_and_gone_is_broken(
    grown: Grown, tmp_path: Path, lost: str
) -> None:
    grown.store.put(prune_key(0), seal(everything()))
    for prefix in PAYLOADS if lost == "all" else PAYLOADS[:1]:
        for info in list(grown.store.list(prefix)):
            grown.store.delete(info.key)
    with pytest.raises(BrokenChainError):
        reached(grown, tmp_path / "newcomer", 31)


OWN, FOREIGN = SigningKey.of(bytes(32)), SigningKey.of(b"\1" * 32)
TRUST: Final = Trust(key=OWN, trusted=TrustedKeys((OWN.public,)))


@pytest.mark.parametrize("forger", [Trust(), Trust(key=FOREIGN)], ids=["unsigned", "forged"])
def test_on_a_signed_chain_planners_ignore_it_and_maintainers_name_it(
    forger: Trust, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    grown = Grown(open_store(str(tmp_path), writer=True), trust=TRUST)
    grown.grow(HEAD + 1)
    grown.store.put(prune_key(0), forger.seal(everything(), "c" * 32))
    chain = Chain.open(grown.store, TRUST)
    chain.prunes.refresh()
    assert not chain.prunes.names_edges
    assert chain.plan(None, chain.read(31)).edges[0].base is None
    with pytest.raises(SignatureError, match=r"prunes/00000000\.json: no trusted key signed it"):
        Pruner(Survey(chain), KeepRule()).run()
    file = tmp_path.with_name(f"{tmp_path.name}.key")
    file.write_bytes(OWN.pem())
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(file))
    for command in (("prune",), ("prune", "--dry-run"), ("maintain", "--once")):
        done = invoke(command[0], tmp_path, *command[1:])
        assert done.code != 0
        assert "prunes/00000000.json: no trusted key signed it" in done.stderr


def maintain(grown: Grown, trust: Trust) -> int:
    """Run rounds until nothing is left to do; return the number of orphans that were deleted."""
    orphans = 0
    for _ in range(3):
        survey = Survey(Chain.open(grown.store, trust))
        pruner = Pruner(survey, KeepRule(last=17, every=40), grace_s=0)
        done = present(Maintainer(survey.chain, pruner, anchor_every=64).round())
        assert done.pruned is not None
        orphans += len(done.pruned.orphans)
    return orphans


def test_what_an_unreadable_record_names_is_no_orphan() -> None:
    """A maintainer that trusts a new key only deletes no skip that the old key signed."""
    grown = Grown(MemoryStore(), trust=TRUST)
    grown.grow(200, density=0.01)
    maintain(grown, TRUST)
    both = Trust(key=FOREIGN, trusted=TrustedKeys((OWN.public, FOREIGN.public)))
    grown.chain = Chain.open(grown.store, both)
    for key, data in grown.chain.sign_identity().items():
        grown.store.put(key, data)
    grown.grow(40, density=0.01)
    maintain(grown, both)
    kept = range(0, grown.head, 40)
    grown.grow(16, density=0.01)
    only = Trust(key=FOREIGN, trusted=TrustedKeys((FOREIGN.public,)))
    assert not maintain(grown, only)
    assert all(is_reachable(Chain.open(grown.store, both), version) for version in kept)
    lost = [version for version in kept if not is_reachable(Chain.open(grown.store, only), version)]
    assert lost  # readers that trust the new key only do without the skips of the old one
