"""Where a publisher goes on: after a restart, and in a store that lost things or went back."""

import logging
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import nn

from deltachain import errors
from deltachain.chain import commits
from deltachain.chain.chain import Chain
from deltachain.format.documents import dump
from deltachain.format.keys import CHAIN_KEY, HEAD_KEY, TABLE_KEY, manifest_key
from deltachain.publish import Publisher
from deltachain.publish import writer as place
from deltachain.store import MemoryStore, Store
from tests.support.backup import objects_of, put_back
from tests.support.faults import Action, Fault, FaultyStore
from tests.support.models import TinyModel, bits_of, plain_model, recompute, same, train_
from tests.support.values import present
from tests.unit.manifest_chains import SingleWriterStore, create, extend, manifest_after
from tests.unit.publish.chains import Attach, Begin, assert_head_is, head_of, publish


@pytest.fixture
def trained(begin: Begin) -> TinyModel:
    """A model whose chain has versions 0 to 3."""
    one = begin(TinyModel(), anchor_factor=1000.0)
    one.publish(1, 2, 3)
    one.publisher.close()
    model: TinyModel = one.model
    return model


def at_step(step: int) -> TinyModel:
    """The model as a checkpoint of that step has it."""
    model = TinyModel()
    for done in range(1, step + 1):
        train_(model, done)
    return model


def versions(store: MemoryStore) -> list[tuple[int, str, int]]:
    """Version, kind and epoch of all that is committed; every one is proven on the way."""
    manifests = [r.committed.manifest for r in recompute(store).values()]
    return [(m.version, m.edge.kind, m.epoch) for m in manifests]


def starts_over(store: Store) -> bool:
    """The way of a newcomer is an anchor of the head."""
    head = head_of(store)
    (edge,) = Chain.open(store).plan(None, head).edges
    return (edge.kind, edge.version) == ("anchor", head.version)


# What cannot be continued


@pytest.mark.parametrize(
    ("other", "settings"),
    [
        (plain_model(), {}),
        (TinyModel(width=32), {}),
        (TinyModel().float(), {}),
        (TinyModel(), {"dtype": "BF16"}),
    ],
)
def test_the_chain_of_another_model_is_refused(
    attach: Attach,
    store: MemoryStore,
    trained: TinyModel,
    other: nn.Module,
    settings: dict[str, str],
) -> None:
    before = versions(store)
    with pytest.raises(errors.ChainMismatchError, match="another model") as caught:
        attach(other, **settings)
    assert "URL of its own" in caught.value.hint
    assert versions(store) == before
    assert_head_is(trained, 3, store)


def test_another_publisher_that_takes_over_first_wins(
    begin: Begin, store: MemoryStore, trained: TinyModel
) -> None:
    with pytest.raises(errors.PublisherFencedError):
        begin(trained, Fault(lambda: begin(trained), "manifests/"))
    assert versions(store)[-1] == (4, "delta", 1)


def test_a_last_version_of_the_publisher_before_is_taken_over_too(begin: Begin) -> None:
    before = begin()
    owner = begin(plain_model(), Fault(lambda: before.publish(1), "manifests/"))
    assert [(v, e) for v, _, e in versions(owner.store)] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert owner.publisher.version == 3
    owner.assert_head_is(3)


# What can


@pytest.mark.usefixtures("trained")
def test_a_restart_in_the_same_state_adds_an_empty_version(begin: Begin) -> None:
    one = begin(at_step(3))
    assert (one.publisher.version, one.publisher.epoch) == (4, 1)
    assert versions(one.store)[3:] == [(3, "delta", 0), (4, "delta", 1)]
    assert head_of(one.store).manifest.edge.parts == ()
    one.assert_head_is(4)


@pytest.mark.parametrize("encoding", ["step", "overwrite", "raw"])
def test_a_restart_from_an_older_checkpoint_publishes_the_difference(
    begin: Begin, trained: TinyModel, encoding: str
) -> None:
    one = begin(at_step(1), encoding=encoding)
    assert versions(one.store)[4:] == [(4, "delta", 1), (5, "delta", 1)]
    assert encoding in head_of(one.store).manifest.edge.encodings
    assert not same(bits_of(one.model), bits_of(trained))
    one.assert_head_is(5)
    one.publish(9)
    one.assert_head_is(6)


@pytest.mark.usefixtures("trained")
def test_a_restart_from_an_unrelated_state_starts_over_with_an_anchor(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    one = begin(TinyModel(seed=77))
    assert versions(one.store)[4:] == [(4, "delta", 1), (5, "anchor", 1)]
    assert "starts over with an anchor" in caplog.text
    one.assert_head_is(5)


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("action", ["hide", "corrupt", "truncate"])
@pytest.mark.parametrize("prefix", ["anchors/", "deltas/00000000000000000002"])
def test_a_chain_that_can_not_be_rebuilt_is_continued_with_an_anchor(
    begin: Begin, action: Action, prefix: str
) -> None:
    one = begin(at_step(1), Fault(action, prefix, times=None))
    assert versions(one.store)[4:] == [(4, "delta", 1), (5, "anchor", 1)]
    one.assert_head_is(5)


@pytest.mark.usefixtures("trained")
def test_attaching_can_be_tried_again(begin: Begin) -> None:
    with pytest.raises(errors.StoreUnavailableError):
        begin(at_step(1), Fault("fail", "deltas/"))
    one = begin(at_step(1))
    one.assert_head_is(one.publisher.version)


def test_a_chain_without_a_version_is_begun(begin: Begin) -> None:
    with pytest.raises(errors.StoreUnavailableError):
        begin(plain_model(), Fault("fail", "anchors/"))
    assert versions(begin().store) == [(0, "anchor", 0)]


# A base checkpoint


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(plain_model().state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    return folder


def test_a_model_that_does_not_hold_the_base_is_refused(
    attach: Attach, store: MemoryStore, base: Path
) -> None:
    with pytest.raises(errors.ConfigError, match="does not hold the bits") as caught:
        attach(plain_model(1), base=base)
    assert "before training" in caught.value.hint
    assert store.find("manifests/00000000000000000000.json") is None


def test_a_base_that_lacks_a_tensor_is_refused(attach: Attach, tmp_path: Path) -> None:
    tensors = plain_model().state_dict()
    del tensors["1.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(errors.ConfigError, match=r"has None, the model has .*1\.bias"):
        attach(plain_model(), base=tmp_path)


def test_a_base_is_referred_to_and_not_uploaded(begin: Begin, base: Path) -> None:
    one = begin(base=base)
    one.publish(1)
    reference = present(recompute(one.store)[0].committed.manifest.edge.reference)
    assert [file.name for file in reference.files] == ["model.safetensors"]
    assert list(one.store.list("anchors/")) == []
    one.assert_head_is(1)
    assets = [info.key.rsplit("/", 1)[1] for info in one.store.list("assets/")]
    assert assets == ["config.json"]


def test_a_restart_rebuilds_from_the_base_wherever_it_lies_now(
    begin: Begin, base: Path, tmp_path: Path
) -> None:
    begin(base=base).publish(1, 2)
    moved = tmp_path / "elsewhere"
    shutil.copytree(base, moved)
    again = plain_model()
    train_(again, 1)
    one = begin(again, base=moved)
    assert versions(one.store)[4] == (4, "delta", 1)
    one.assert_head_is(4)


def test_a_restart_without_its_base_starts_over_with_an_anchor(begin: Begin, base: Path) -> None:
    one = begin(base=base)
    shutil.rmtree(base)
    train_(one.model, 1)
    head = head_of(begin(one.model).store)
    assert (head.version, head.manifest.edge.kind) == (2, "anchor")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "AGAIN_S", 0.0)


def lose(store: MemoryStore, *prefixes: str) -> None:
    for info in list(store.list()):
        if info.key.startswith(prefixes):
            store.delete(info.key)


# A publisher that outlives its store


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_an_open_publisher_waits_for_a_store_that_went_back(
    begin: Begin, store: MemoryStore, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = begin(on_error=on_error)
    one.publish(1)
    then = objects_of(store)
    one.publish(2, 3)
    now = objects_of(store)
    put_back(store, then)
    for step in (4, 5, 6):
        before = objects_of(store) if step > 4 else {}
        try:
            future = one.call(step)
            one.publisher.flush()
        except errors.StoreWentBackError:
            assert on_error == "raise"
        else:
            assert on_error == "warn"
            assert not future.done() or isinstance(future.exception(), errors.StoreWentBackError)
        assert head_of(store).version == 1
        assert not before or objects_of(store) == before  # and no payload is put in vain
    assert on_error == "raise" or caplog.text.count("went back") >= 3
    put_back(store, now)
    one.publish(7)
    one.assert_head_is(4)


def test_a_restarted_publisher_goes_on_where_the_store_went_back_to(
    begin: Begin, store: MemoryStore
) -> None:
    one = begin()
    one.publish(1)
    then = objects_of(store)
    one.publish(2, 3)
    put_back(store, then)
    with pytest.raises(errors.StoreWentBackError, match="restart this publisher"):
        one.publish(4)
    one.publisher.close()
    assert objects_of(store).get(HEAD_KEY) == then.get(HEAD_KEY)
    again = begin(one.model)
    again.publish(5)
    again.assert_head_is(again.publisher.version)
    assert again.publisher.epoch == 1


def test_a_publisher_puts_back_what_its_chain_is_known_by(begin: Begin, store: MemoryStore) -> None:
    one = begin()
    identity = {key: store.get(key) for key in (CHAIN_KEY, TABLE_KEY)}
    lose(store, *identity)
    restored: list[str] = []
    for step in range(1, 9):
        one.publish(step)
        restored += present(one.publisher.last).restored
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
    before = objects_of(any_store)
    with pytest.raises(errors.BrokenChainError, match=r"of versions \d+.* are missing") as caught:
        place.newest(Chain.open(any_store))
    assert caught.value.version == gap[0]
    assert objects_of(any_store) == before
    for version in range(gap[1], 45):  # the way out, as the hint has it
        any_store.delete(manifest_key(version))
    found = present(place.newest(Chain.open(any_store)))
    assert found.version == gap[0] - 1


@pytest.mark.parametrize("hint", [None, 2, 8])
def test_a_version_whose_manifest_alone_is_lost_is_passed_over(
    begin: Begin, store: MemoryStore, hint: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    one = begin()
    one.publish(*range(1, 10))
    store.delete(manifest_key(5))
    store.delete(HEAD_KEY)
    if hint is not None:
        Chain.open(store).write_head(hint, [])
    train_(one.model, 10)
    assert begin(one.model).publisher.version == head_of(store).version == 11
    assert hint == 8 or "of versions 5: something deletes" in caplog.text


def test_a_version_far_behind_a_gap_is_found(store: MemoryStore) -> None:
    made = extend(create(store), 3)
    for version in (2 + 9_000, 2 + 19_990, 2 + 2**20):
        store.put(manifest_key(version), b"any")
        with pytest.raises(errors.BrokenChainError, match=f"one of version {version}"):
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
    begin: Begin, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A rule took all that is older than its last versions, the hint too."""
    one = begin()
    one.publish(*range(1, 10))
    kept = {CHAIN_KEY, TABLE_KEY, *map(manifest_key, (7, 8, 9))}
    put_back(store, {key: data for key, data in objects_of(store).items() if key in kept})
    with caplog.at_level(logging.WARNING):
        again = begin(one.model, anchor_factor=0.001)
    assert again.publisher.version == 10
    assert "of versions 0 to 6: something deletes" in caplog.text
    again.publish(11)
    head = head_of(store)
    assert (head.version, head.state) == (11, present(again.publisher.last).state)
    assert starts_over(store)  # a newcomer has a way again


# An identity that is lost, and nobody open who holds it


def test_the_same_model_makes_a_lost_identity_again(
    begin: Begin, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    one = begin()
    one.publish(1, 2)
    one.publisher.close()
    before = Chain.open(store).identity
    for gone in ([CHAIN_KEY], [CHAIN_KEY, TABLE_KEY]):
        lose(store, *gone)
        train_(one.model, 7)
        again = begin(one.model)
        after = Chain.open(store).identity
        assert (after.chain, after.table) == (before.chain, before.table)
        again.assert_head_is(again.publisher.version)
        again.publisher.close()
    assert "was made anew for chain" in caplog.text


@pytest.mark.parametrize(
    ("gone", "model", "why", "hint"),
    [
        ([CHAIN_KEY], TinyModel(), "cannot be shown to be that of chain", "from a backup"),
        (
            [CHAIN_KEY, TABLE_KEY],
            TinyModel(),
            "cannot be shown to be that of chain",
            "from a backup",
        ),
        ([CHAIN_KEY, TABLE_KEY, "anchors/"], plain_model(), "cannot be rebuilt", ""),
    ],
)
def test_nothing_is_made_where_nothing_can_be_shown(
    attach: Attach, store: MemoryStore, gone: list[str], model: nn.Module, why: str, hint: str
) -> None:
    publish(attach(plain_model()), plain_model(), 1)
    lose(store, *gone)
    before = objects_of(store)
    with pytest.raises(errors.BrokenChainError, match=why) as caught:
        attach(model)
    assert hint in caught.value.hint
    assert objects_of(store) == before


def test_versions_of_two_chains_are_not_told_apart(attach: Attach, store: MemoryStore) -> None:
    made = extend(create(store), 3)
    store.delete(CHAIN_KEY)
    store.put(manifest_key(3), dump(manifest_after(made[-1], chain="two")))
    with pytest.raises(errors.DeltaChainError):
        attach(plain_model())


def test_an_anchor_that_expired_is_made_again(
    begin: Begin, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    one = begin(anchor_factor=1000.0)
    one.publish(1)
    lose(store, "anchors/")
    one.publish(*range(2, 9))
    assert "newcomers need an anchor that is gone" in caplog.text
    assert head_of(store).version == 8
    assert starts_over(store)
    one.publisher.close()
    lose(store, "anchors/")
    begin(one.model, anchor_factor=1000.0).publish(10)
    assert starts_over(store)


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("part", [0, -1])
def test_an_anchor_of_which_a_part_is_no_good_is_made_again_at_a_start(
    begin: Begin, store: MemoryStore, part: int, *, is_cut: bool
) -> None:
    one = begin(anchor_factor=1000.0, part_nbytes=64)
    one.publish(1)
    one.publisher.close()
    parts = sorted(info.key for info in store.list("anchors/"))
    assert len(parts) > 1
    data = store.get(parts[part])
    store.delete(parts[part])
    if is_cut:
        store.put(parts[part], data[:-1])
    begin(one.model, anchor_factor=1000.0).publish(2)
    assert starts_over(store)


@pytest.mark.parametrize("lost", [manifest_key(2), "deltas/00000000000000000002"])
def test_an_anchor_is_due_where_something_on_the_way_to_the_head_is_gone(
    begin: Begin, store: MemoryStore, lost: str
) -> None:
    one = begin(anchor_factor=1000.0)
    one.publish(1, 2, 3)
    one.publisher.close()
    lose(store, lost)
    begin(one.model, anchor_factor=1000.0).publish(4)
    assert starts_over(store)


# What closing leaves behind


def test_closing_leaves_nothing_in_a_store_that_was_emptied(
    attach: Attach, store: MemoryStore
) -> None:
    publisher = attach(plain_model())
    lose(store, "")
    publisher.close()
    assert objects_of(store) == {}
    attach(plain_model(1))  # a new chain may begin there
    assert head_of(store).version == 0


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
