import random
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from deltachain.chain.chain import Chain, is_reachable
from deltachain.chain.trust import SigningKey, Trust, TrustedKeys
from deltachain.checkpoint import Checkpoint
from deltachain.errors import BrokenChainError, DeltaChainError, ObjectNotFoundError, SignatureError
from deltachain.format.documents import PrunedKind, PrunedRange, PruneRecord, seal
from deltachain.format.keys import PAYLOADS, prune_key
from deltachain.maintain import KeepRule, Maintained, Maintainer, Pruner
from deltachain.maintain.added_edges import add_anchor
from deltachain.maintain.survey import Survey
from deltachain.store import MemoryStore, open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.faults import FaultyStore
from tests.support.values import present
from tests.unit.cli.support import invoke
from tests.unit.maintain.grown import SPECS, Grown, payloads

HEAD: Final = 59
SPANS: Final[tuple[tuple[PrunedKind, int], ...]] = (("anchor", 0), ("delta", 1), ("skip", 8))


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


def follower(grown: Grown, folder: Path) -> Subscriber:
    return Subscriber(SubscribeConfig(url=grown.store.url), folder, store=grown.store)


def check(grown: Grown, folder: Path, version: int = -1) -> None:
    held = Checkpoint(folder)
    for spec in SPECS:
        assert np.array_equal(held.bits(spec.name), grown.bits[version][spec.name])


def check_reached(grown: Grown, folder: Path, version: int) -> None:
    """Follow up to a version in a folder, and check the bits held then."""
    with follower(grown, folder) as subscriber:
        receipt = subscriber.update(version)
    assert receipt is None or receipt.version == version
    check(grown, folder, version)


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
        check_reached(grown, tmp_path / "follower", version)
    for folder in ("follower", "newcomer"):
        check_reached(grown, tmp_path / folder, HEAD)


def test_such_a_record_deletes_nothing_that_is_kept(
    grown: Grown, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = payloads(grown.store)
    grown.store.put(prune_key(0), seal(everything()))
    pruner = Pruner(Survey(Chain.open(grown.store)), KeepRule(), grace_s=0.0)
    for _ in range(2):
        pruner.run()
    assert payloads(grown.store) == before
    assert "restart the publisher, which adds an anchor" in caplog.text
    check_reached(grown, tmp_path / "newcomer", HEAD)


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
        check_reached(grown, tmp_path / "newcomer", 31)


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


@pytest.mark.full
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


def maintained(grown: Grown) -> Maintained:
    return present(Maintainer(Chain.open(grown.store), None).round())


def expire(grown: Grown, chance: random.Random) -> list[str]:
    """Delete what is older than some version, as a rule by age does, or a few objects at random."""
    keys = [*payloads(grown.store)]
    if chance.random() < 0.5:
        limit = chance.randint(max(0, grown.head - 12), grown.head)
        lost = [key for key in keys if int(key.split("/")[1][:20]) <= limit]
    else:
        lost = chance.sample(keys, min(len(keys), chance.randint(1, 6)))
    for key in lost:
        grown.store.delete(key)
    return lost


@pytest.mark.parametrize("rounds", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_followers_go_on_and_newcomers_come_in_with_an_anchor(tmp_path: Path, rounds: int) -> None:
    """A follower that holds the head applies what is committed next, whatever was deleted."""
    grown, chance = Grown(MemoryStore()), random.Random(7)
    grown.grow(20)
    broken = 0
    with follower(grown, tmp_path / "copy") as ahead:
        ahead.update()
        for number in range(rounds):
            lost = expire(grown, chance)
            grown.grow(chance.randint(1, 3))
            receipt = present(ahead.update())
            assert receipt.version == grown.head
            check(grown, tmp_path / "copy")
            chain = Chain.open(grown.store)
            if not is_reachable(chain, grown.head):
                broken += 1
                with (
                    follower(grown, tmp_path / f"early-{number}") as newcomer,
                    pytest.raises(DeltaChainError) as caught,
                ):
                    newcomer.update()
                assert isinstance(caught.value, BrokenChainError | ObjectNotFoundError)
                assert "restart the publisher" in caught.value.hint
                assert "newcomers cannot reach version" in maintained(grown).failed[0]
                assert lost
                grown.anchor()
            assert is_reachable(chain, grown.head)
            ahead.update()
            with follower(grown, tmp_path / f"late-{number}") as newcomer:
                newcomer.update()
            check(grown, tmp_path / f"late-{number}")
    assert broken > rounds // 4


def test_rounds_look_for_no_lost_payload_again_and_name_it_once() -> None:
    grown = Grown(MemoryStore())
    grown.grow(70)
    grown.chain.write_head(grown.head, [add_anchor(grown.chain, grown.chain.read(40))])
    lost = [
        key for key in payloads(grown.store) if key.startswith("deltas/") and version(key) <= 36
    ]
    for key in lost:
        grown.store.delete(key)
    store = FaultyStore(grown.store)
    maintainer = Maintainer(Chain.open(store), None)
    first = present(maintainer.round())
    assert [skip.version for skip in first.skips] == [64, 56, 48]
    assert len(first.failed) == 1
    assert "parts of 36 edges, the delta to version 1 first, are gone" in first.failed[0]
    again = present(maintainer.round())
    assert (again.skips, again.failed) == ((), ())
    assert not set(store.keys_read) & set(lost)


def test_a_lost_anchor_is_planned_around_when_another_is_added() -> None:
    grown = Grown(MemoryStore())
    grown.grow(30)
    grown.chain.write_head(grown.head, [add_anchor(grown.chain, grown.chain.read(16))])
    lose_anchor(grown, 16)
    chain = Chain.open(grown.store)
    assert add_anchor(chain, chain.read(24)).version == 24
    assert is_reachable(chain, 24)


@pytest.mark.parametrize("what", ["anchor", "record"])
def test_an_anchor_is_uploaded_once(what: str) -> None:
    """A whole model must not be uploaded for a record that exists."""
    grown = Grown(MemoryStore())
    grown.grow(20)
    head = grown.chain.read(grown.head)
    first = add_anchor(grown.chain, head)
    if what == "record":
        lose_anchor(grown, grown.head)
    before = payloads(grown.store)
    if what == "anchor":
        assert add_anchor(grown.chain, head) == first
    else:
        with pytest.raises(BrokenChainError, match="was recorded before, and its parts are gone"):
            add_anchor(grown.chain, head)
    assert payloads(grown.store) == before


def lose_anchor(grown: Grown, version: int) -> None:
    for info in list(grown.store.list(f"anchors/{version:020d}")):
        grown.store.delete(info.key)


def version(key: str) -> int:
    return int(key.split("/")[1][:20])


@pytest.mark.full
@pytest.mark.parametrize("lost", [101, 104])
def test_a_skip_around_a_lost_delta_stays_with_the_kept_versions_behind_it(lost: int) -> None:
    """It begins before the newest versions; the way to the head needs a later anchor only."""
    grown = Grown(MemoryStore())
    for anchor, head in ((64, 70), (112, 113)):
        grown.grow(head - grown.head, density=0.01)
        add_anchor(grown.chain, grown.chain.read(anchor))
        Maintainer(grown.chain, None).hint(grown.chain.read(head))
    grown.grow(129 - grown.head, density=0.01)
    Maintainer(Chain.open(grown.store), None).round()
    for info in list(grown.store.list(f"deltas/{lost:020d}")):
        grown.store.delete(info.key)
    reached = [version for version in range(100, 130) if is_reachable(grown.chain, version)]
    assert {*range(104, 130)} <= {*reached}
    pruner = Pruner(Survey(Chain.open(grown.store)), KeepRule(last=30), grace_s=0.0)
    deleted = [pruner.run() for _ in range(2)]
    assert any(plan is not None and plan.due for plan in deleted)
    chain = Chain.open(grown.store)
    assert [version for version in range(100, 130) if is_reachable(chain, version)] == reached
