"""Where a publisher goes on in a store that lost things or went back."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltachain.chain import commits
from deltachain.chain.chain import Chain
from deltachain.errors import BrokenChainError, DeltaChainError, StoreWentBackError
from deltachain.format.documents import dump
from deltachain.format.keys import CHAIN_KEY, HEAD_KEY, TABLE_KEY, manifest_key
from deltachain.publish import Publisher
from deltachain.publish import writer as place
from deltachain.store import MemoryStore
from tests.support.faults import Fault, FaultyStore
from tests.support.models import TinyModel, bits_of, plain_model, recompute, same, train_
from tests.support.values import present
from tests.unit.manifest_chains import SingleWriterStore, create, extend, manifest_after

Attach = Callable[..., Publisher]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "AGAIN_S", 0.0)


def keys_of(store: MemoryStore) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list()}


def lose(store: MemoryStore, *prefixes: str) -> None:
    for info in list(store.list()):
        if info.key.startswith(prefixes):
            store.delete(info.key)


def go_back(store: MemoryStore, objects: dict[str, bytes]) -> None:
    lose(store, "")
    for key, data in objects.items():
        store.put(key, data)


def publish(publisher: Publisher, model: Any, *steps: int) -> None:
    for step in steps:
        train_(model, step)
        publisher.publish(step=step)
        publisher.flush()


def head_of(store: MemoryStore) -> int:
    head = present(Chain.open(store).head())
    return head.version


# A publisher that outlives its store


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_an_open_publisher_waits_for_a_store_that_went_back(
    attach: Attach, store: MemoryStore, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = plain_model()
    publisher = attach(model, on_error=on_error)
    publish(publisher, model, 1)
    then = keys_of(store)
    publish(publisher, model, 2, 3)
    now = keys_of(store)
    go_back(store, then)
    for step in (4, 5, 6):
        train_(model, step)
        before = keys_of(store) if step > 4 else {}
        try:
            future = publisher.publish(step=step)
            publisher.flush()
        except StoreWentBackError:
            assert on_error == "raise"
        else:
            assert on_error == "warn"
            assert not future.done() or isinstance(future.exception(), StoreWentBackError)
        assert head_of(store) == 1
        assert not before or keys_of(store) == before  # and no payload is put in vain
    assert on_error == "raise" or caplog.text.count("went back") >= 3
    go_back(store, now)
    publish(publisher, model, 7)
    found = recompute(store)
    assert max(found) == 4
    assert same(found[4].state, bits_of(model))


def test_a_restarted_publisher_goes_on_where_the_store_went_back_to(
    attach: Attach, store: MemoryStore
) -> None:
    model = plain_model()
    publisher = attach(model)
    publish(publisher, model, 1)
    then = keys_of(store)
    publish(publisher, model, 2, 3)
    go_back(store, then)
    with pytest.raises(StoreWentBackError, match="restart this publisher"):
        publish(publisher, model, 4)
    publisher.close()
    assert keys_of(store).get(HEAD_KEY) == then.get(HEAD_KEY)
    again = attach(model)
    publish(again, model, 5)
    found = recompute(store)
    assert max(found) == again.version
    assert same(found[again.version].state, bits_of(model))
    assert again.epoch == 1


def test_a_publisher_puts_back_what_its_chain_is_known_by(
    attach: Attach, store: MemoryStore
) -> None:
    model = plain_model()
    publisher = attach(model)
    identity = {key: store.get(key) for key in (CHAIN_KEY, TABLE_KEY)}
    lose(store, *identity)
    restored: list[str] = []
    for step in range(1, 9):
        publish(publisher, model, step)
        assert publisher.last is not None
        restored += publisher.last.restored
    assert {key: store.get(key) for key in identity} == identity
    assert restored == list(identity)


# Versions behind a gap


@pytest.fixture(params=[MemoryStore, SingleWriterStore])
def any_store(request: pytest.FixtureRequest) -> MemoryStore:
    made: MemoryStore = request.param()
    return made


@pytest.mark.parametrize("gap", [(3, 5), (3, 15), (3, 40), (1, 40), (40, 41), (43, 44)])
def test_versions_behind_a_gap_are_never_walked_into(
    any_store: MemoryStore, gap: tuple[int, int]
) -> None:
    chain = create(any_store)
    extend(chain, 45)
    chain.write_head(gap[0] - 1, [])
    for version in range(*gap):
        any_store.delete(manifest_key(version))
    before = keys_of(any_store)
    with pytest.raises(BrokenChainError, match=r"of versions \d+.* are missing") as caught:
        place.newest(Chain.open(any_store))
    assert caught.value.version == gap[0]
    assert keys_of(any_store) == before
    for version in range(gap[1], 45):  # the way out, as the hint has it
        any_store.delete(manifest_key(version))
    found = present(place.newest(Chain.open(any_store)))
    assert found.version == gap[0] - 1


@pytest.mark.parametrize("hint", [None, 2, 8])
def test_a_version_whose_manifest_alone_is_lost_is_passed_over(
    attach: Attach, store: MemoryStore, hint: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = plain_model()
    publish(attach(model), model, *range(1, 10))
    store.delete(manifest_key(5))
    store.delete(HEAD_KEY)
    if hint is not None:
        Chain.open(store).write_head(hint, [])
    train_(model, 10)
    again = attach(model)
    assert again.version == 11
    chain = Chain.open(store)
    head = present(chain.head())
    assert head.version == 11
    assert hint == 8 or "of versions 5: something deletes" in caplog.text


def test_a_version_far_behind_a_gap_is_found(store: MemoryStore) -> None:
    made = extend(create(store), 3)
    for version in (2 + 9_000, 2 + 19_990, 2 + 2**20):
        store.put(manifest_key(version), b"any")
        with pytest.raises(BrokenChainError, match=f"one of version {version}"):
            place.newest(Chain.open(store))
        store.delete(manifest_key(version))
    assert place.newest(Chain.open(store)) == made[-1]


def test_a_listing_may_lag(store: MemoryStore) -> None:
    chain = create(store)
    made = extend(chain, 3)
    faulty = FaultyStore(store, Fault("stale-list", "manifests/", times=None))
    made += extend(chain, 30, made[-1])
    assert place.newest(Chain.open(faulty)) == made[-1]


def test_what_is_left_of_an_idle_chain_is_gone_on_with(
    attach: Attach, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A rule took all that is older than its last versions, the hint too."""
    model = plain_model()
    publish(attach(model), model, *range(1, 10))
    kept = {CHAIN_KEY, TABLE_KEY, *map(manifest_key, (7, 8, 9))}
    go_back(store, {key: data for key, data in keys_of(store).items() if key in kept})
    with caplog.at_level(logging.WARNING):
        again = attach(model, anchor_factor=0.001)
    assert again.version == 10
    assert "of versions 0 to 6: something deletes" in caplog.text
    publish(again, model, 11)
    head = present(Chain.open(store).head())
    assert (head.version, head.state) == (11, again.last.state if again.last else None)
    plan = Chain.open(store).plan(None, head)  # a newcomer has a way again
    assert [edge.kind for edge in plan.edges] == ["anchor"]


# An identity that is lost, and nobody open who holds it


def test_the_same_model_makes_a_lost_identity_again(
    attach: Attach, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = plain_model()
    publisher = attach(model)
    publish(publisher, model, 1, 2)
    publisher.close()
    before = Chain.open(store).identity
    for gone in ([CHAIN_KEY], [CHAIN_KEY, TABLE_KEY]):
        lose(store, *gone)
        train_(model, 7)
        again = attach(model)
        after = Chain.open(store).identity
        assert (after.chain, after.table) == (before.chain, before.table)
        found = recompute(store)
        assert max(found) == again.version
        assert same(found[again.version].state, bits_of(model))
        again.close()
    assert "was made anew for chain" in caplog.text


def test_another_model_does_not(attach: Attach, store: MemoryStore) -> None:
    model = plain_model()
    publish(attach(model), model, 1)
    for gone in ([CHAIN_KEY], [TABLE_KEY]):
        lose(store, *gone)
        before = keys_of(store)
        with pytest.raises(BrokenChainError, match="cannot be shown to be that of chain") as one:
            attach(TinyModel())
        assert "from a backup" in one.value.hint
        assert keys_of(store) == before


def test_nothing_is_made_where_nothing_can_be_shown(attach: Attach, store: MemoryStore) -> None:
    model = plain_model()
    publish(attach(model), model, 1)
    lose(store, CHAIN_KEY, TABLE_KEY, "anchors/")
    before = keys_of(store)
    with pytest.raises(BrokenChainError, match="cannot be rebuilt"):
        attach(model)
    assert keys_of(store) == before


def test_versions_of_two_chains_are_not_told_apart(attach: Attach, store: MemoryStore) -> None:
    made = extend(create(store), 3)
    store.delete(CHAIN_KEY)
    store.put(manifest_key(3), dump(manifest_after(made[-1], chain="two")))
    with pytest.raises(DeltaChainError):
        attach(plain_model())


def test_an_anchor_that_expired_is_made_again(
    attach: Attach, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = plain_model()
    publisher = attach(model, anchor_factor=1000.0)
    publish(publisher, model, 1)
    lose(store, "anchors/")
    publish(publisher, model, *range(2, 9))
    assert "newcomers need an anchor that is gone" in caplog.text
    chain = Chain.open(store)
    head = present(chain.head())
    (edge,) = chain.plan(None, head).edges
    assert (edge.kind, edge.version) == ("anchor", 8)
    publisher.close()
    lose(store, "anchors/")
    again = attach(model, anchor_factor=1000.0)
    publish(again, model, 10)
    head = present(chain.head())
    assert chain.plan(None, head).edges[0].version == head.version


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("part", [0, -1])
def test_an_anchor_of_which_a_part_is_no_good_is_made_again_at_a_start(
    attach: Attach, store: MemoryStore, part: int, *, is_cut: bool
) -> None:
    model = plain_model()
    publisher = attach(model, anchor_factor=1000.0, part_nbytes=64)
    publish(publisher, model, 1)
    publisher.close()
    parts = sorted(info.key for info in store.list("anchors/"))
    assert len(parts) > 1
    data = store.get(parts[part])
    store.delete(parts[part])
    if is_cut:
        store.put(parts[part], data[:-1])
    publish(attach(model, anchor_factor=1000.0), model, 2)
    head = present(Chain.open(store).head())
    assert Chain.open(store).plan(None, head).edges[0].version == head.version


# What closing leaves behind


def test_closing_leaves_nothing_in_a_store_that_was_emptied(
    attach: Attach, store: MemoryStore
) -> None:
    publisher = attach(plain_model())
    lose(store, "")
    publisher.close()
    assert keys_of(store) == {}
    attach(plain_model(1))  # a new chain may begin there
    assert head_of(store) == 0


@pytest.mark.parametrize("lost", [manifest_key(2), "deltas/00000000000000000002"])
def test_an_anchor_is_due_where_something_on_the_way_to_the_head_is_gone(
    attach: Attach, store: MemoryStore, lost: str
) -> None:
    model = plain_model()
    publisher = attach(model, anchor_factor=1000.0)
    publish(publisher, model, 1, 2, 3)
    publisher.close()
    lose(store, lost)
    publish(attach(model, anchor_factor=1000.0), model, 4)
    head = present(Chain.open(store).head())
    assert Chain.open(store).plan(None, head).edges[0].version == head.version


@pytest.mark.parametrize("level", ["WARNING", "INFO"])
def test_attach_says_where_weights_go(
    tmp_path: Path,
    level: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(level, logger="deltachain")
    Publisher("s3/chains/run1").attach(plain_model()).close()
    line = f"publishing to {(tmp_path / 's3/chains/run1').as_uri()}"
    assert (f"deltachain: {line}\n" in capsys.readouterr().err) == (level == "WARNING")
    assert (line in caplog.messages) == (level == "INFO")
