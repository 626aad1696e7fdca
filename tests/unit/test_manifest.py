import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from deltachain.chain import heartbeat, tags
from deltachain.chain.chain import Chain
from deltachain.chain.heartbeat import newest_prune, read_heartbeat, write_heartbeat
from deltachain.chain.tags import VersionChoice, choose, sign_again
from deltachain.chain.trust import SigningKey, Trust
from deltachain.errors import (
    BrokenChainError,
    ChainError,
    ChainMismatchError,
    ForkedChainError,
    PublisherFencedError,
    StaleChainError,
)
from deltachain.format.documents import (
    Document,
    Head,
    Manifest,
    PruneRecord,
    dump,
    parse,
    seal,
    summarise,
    unseal,
)
from deltachain.format.keys import CHAIN_KEY, HEARTBEAT_KEY, manifest_key, prune_key, tag_key
from deltachain.maintain import KeepRule, Pruner
from deltachain.maintain.survey import Survey
from deltachain.mirror import Mirror
from deltachain.publish.side_threads import HeartbeatThread, NewestRecords
from deltachain.publish.writer import Writer
from deltachain.store import MemoryStore
from deltachain.types import Buffer
from tests.format.test_hostile_json import CHAIN, FILES, frozen, read
from tests.hostile.signed import OWNER, SPEC, Author, trust_of
from tests.support.faults import FaultyStore
from tests.support.values import eventually, present
from tests.unit.cli.support import invoke, ok, random_state, train, write_checkpoint
from tests.unit.manifest_chains import SingleWriterStore, WideStore, create, extend, manifest_after


@pytest.fixture
def wide() -> WideStore:
    return WideStore()


def test_a_single_writer_store_is_read_back_after_every_commit() -> None:
    inner = SingleWriterStore()
    chain = create(inner)

    def other_writes_too() -> None:
        inner.put(manifest_key(0), seal(manifest_after(None, commit_id="theirs")))

    class Racing(FaultyStore):
        def put(self, key: str, data: Buffer) -> str:
            pin = super().put(key, data)
            other_writes_too()  # between our put and our look
            return pin

    racing = Chain(Racing(inner), chain.identity, chain.table)
    with pytest.raises(PublisherFencedError, match="commit theirs"):
        racing.commit(manifest_after(None))


@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 19, 50, 400])
@pytest.mark.parametrize("known", [0, 1, 15, 49])
def test_the_newest_is_found_in_few_wide_looks(wide: WideStore, length: int, known: int) -> None:
    chain = create(wide)
    extend(chain, length)
    wide.looks.clear()
    known = min(known, length - 1)
    assert chain.newest(known) == length - 1
    assert len(wide.looks) == 1 if length - 1 - known <= 16 else len(wide.looks) <= 3
    assert all(len(look) <= 1000 for look in wide.looks)


def test_a_gap_ahead_is_named(wide: WideStore) -> None:
    chain = create(wide)
    extend(chain, 5)
    wide.delete(manifest_key(2))
    for known in (1, 2):
        with pytest.raises(BrokenChainError, match="2 is missing, although version 4 exists"):
            chain.newest(known)


@pytest.mark.parametrize("store", [SingleWriterStore(), WideStore()], ids=["narrow", "wide"])
def test_a_replaced_manifest_is_a_fork(store: MemoryStore) -> None:
    """Reported by the next look of whoever saw the first, and never committed upon."""
    publisher, follower = create(store), Chain.open(store)
    made = extend(publisher, 3)
    assert follower.newest(0) == 2
    theirs = manifest_after(made[1], commit_id="theirs, which is another")
    store.put(manifest_key(2), seal(theirs))
    with pytest.raises(ForkedChainError, match="version 2 was replaced by another publisher"):
        follower.newest(2)
    with pytest.raises(PublisherFencedError, match="version 3 cannot follow: the manifest"):
        publisher.commit(manifest_after(made[2]))
    assert store.find(manifest_key(3)) is None
    with pytest.raises(PublisherFencedError, match="committed by another publisher"):
        Chain.open(store).commit(made[2].manifest)


def test_manifests_are_looked_at_together_and_not_again(wide: WideStore) -> None:
    made = extend(create(wide), 300)
    chain = Chain.open(wide)
    wide.looks.clear()
    assert list(chain.history(0, 299)) == made
    assert [len(look) for look in wide.looks] == [301]
    chain = Chain.open(wide)
    plan = chain.plan(263, made[-1])
    assert len(plan.edges) == 36
    wide.looks.clear()
    chain.look_ahead(plan)
    assert [chain.read(edge.version) for edge in plan.edges] == made[264:]
    assert len(wide.looks) == 1
    chain = Chain.open(wide)
    assert chain.newest(290) == 299
    wide.looks.clear()
    assert chain.read(299) == made[299]
    assert (wide.looks, wide.pinned[-1]) == ([], made[299].digest)


def test_a_replaced_identity_fences_whoever_made_the_first(wide: WideStore) -> None:
    chain = create(wide)
    wide.put(CHAIN_KEY, wide.get(CHAIN_KEY).replace(b"one", b"two"))
    with pytest.raises(PublisherFencedError, match="version 0 cannot follow: the chain at this"):
        extend(chain, 1)
    assert wide.find(manifest_key(0)) is None


def test_a_follower_of_a_replaced_chain_says_so(wide: WideStore) -> None:
    """Also once the manifests of the first are all that is left of it."""
    extend(create(wide), 2)
    follower = Chain.open(wide)
    assert follower.newest(0) == 1
    wide.put(CHAIN_KEY, wide.get(CHAIN_KEY).replace(b"one", b"two"))
    with pytest.raises(ForkedChainError, match="the chain at this URL was replaced"):
        follower.newest(1)
    with pytest.raises(ChainMismatchError, match=r"belongs to chain one, but chain\.json to two"):
        Chain.open(wide).read(1)


def test_a_commit_takes_two_looks(wide: WideStore) -> None:
    chain = create(wide)
    made = extend(chain, 2)
    wide.looks.clear()
    chain.commit(manifest_after(made[-1]))
    assert wide.looks == [
        [CHAIN_KEY, manifest_key(1), manifest_key(2)],
        [CHAIN_KEY, manifest_key(1), manifest_key(2), manifest_key(3)],
    ]


def test_a_publisher_that_slept_before_its_put_is_fenced_by_what_came_since(
    wide: WideStore,
) -> None:
    made = extend(create(wide), 1)

    class Slow(FaultyStore):
        def put(self, key: str, data: Buffer) -> str:
            extend(Chain.open(wide), 2, made[0])
            return super().put(key, data)

    slow = Chain.open(Slow(wide))
    with pytest.raises(PublisherFencedError, match="version 2 already exists"):
        slow.commit(manifest_after(made[0], commit_id="late"))


READER = trust_of(1)
LIMIT_S = 60.0


def tag(author: Author, name: str, version: int) -> None:
    tags.set_(author.chain, name, author.chain.read(version), time=time.time())


def prune(author: Author, number: int) -> None:
    """Write a prune record that names nothing."""
    chain = author.chain.identity.chain
    record = PruneRecord(chain=chain, number=number, head=0, maintainer="m", time=1.0, pruned=())
    author.store.put(prune_key(number), OWNER.seal(record, chain))


def writer_of(author: Author) -> Writer:
    chain = Chain.open(author.store, OWNER)
    return Writer(chain, numel=SPEC.numel, metadata={}, parent=author.parent)


def beat(author: Author, newest: NewestRecords | None = None, *, age: float = 0.0) -> NewestRecords:
    """Write a heartbeat as a publisher: one that just started, without ``newest``."""
    newest = newest or NewestRecords(writer_of(author))
    newest.look()
    assert author.parent is not None
    now = time.time() - age
    write_heartbeat(author.chain, author.parent, now=now, tags=newest.tags, prune=newest.prune)
    return newest


def pruner_of(author: Author) -> Pruner:
    return Pruner(Survey(Chain.open(author.store, OWNER)), KeepRule(last=1))


def reader_of(author: Author, trust: Trust = READER) -> Chain:
    return Chain.open(author.store, trust)


@pytest.fixture
def author() -> Author:
    """A chain of four versions; ``prod`` moved from version 1 to 3, ``old`` was removed."""
    made = Author().grow(4)
    tag(made, "prod", 1)
    tag(made, "old", 2)
    tag(made, "prod", 3)
    tags.remove(made.chain, "old", time=1.0)
    for number in range(3):
        prune(made, number)
    beat(made)
    return made


def test_what_is_the_newest_is_read(author: Author) -> None:
    chain = reader_of(author)
    assert choose(chain, VersionChoice(tag="prod")).version == 3
    assert tags.read(chain, "old") is None
    assert [(one.name, one.version) for one in tags.read_all(chain)] == [("prod", 3)]
    found = present(newest_prune(chain))
    assert found.number == 2
    named = present(read_heartbeat(chain))
    assert (named.tags, named.prunes) == ({"old": 1, "prod": 1}, 3)


USES: dict[str, Callable[[Author], object]] = {
    "pull": lambda author: choose(reader_of(author), VersionChoice(tag="prod")),
    "list": lambda author: tags.read_all(reader_of(author)),
    "prune": lambda author: pruner_of(author).run(),
    "rotate": lambda author: sign_again(Chain.open(author.store, trust_of(1, 2, key=2))),
}


@pytest.mark.parametrize("use", USES)
def test_a_tag_that_is_turned_back_is_refused(author: Author, use: str) -> None:
    author.store.delete(tag_key("prod", 1))
    before = list(author.store.list("tags/"))
    with pytest.raises(StaleChainError, match=r"record 0 of tag 'prod' as the newest.* names 1"):
        USES[use](author)
    assert list(author.store.list("tags/")) == before


@pytest.mark.parametrize(
    ("name", "hidden", "newest"), [("old", [1], 0), ("prod", [0, 1], -1)], ids=["removed", "all"]
)
def test_a_tag_whose_records_are_hidden_is_missed(
    author: Author, name: str, hidden: list[int], newest: int
) -> None:
    for number in hidden:
        author.store.delete(tag_key(name, number))
    for read_tags in (lambda chain: tags.read(chain, name), tags.read_all):
        with pytest.raises(StaleChainError, match=f"record {newest} of tag '{name}'"):
            read_tags(reader_of(author))


def test_without_trusted_keys_nobody_asks_for_a_heartbeat(author: Author) -> None:
    author.store.delete(tag_key("prod", 1))
    author.store.put(HEARTBEAT_KEY, b"{}")
    assert choose(reader_of(author, Trust()), VersionChoice(tag="prod")).version == 1


@pytest.mark.parametrize("use", ["tag", "prune", "rotate"])
def test_a_prune_record_that_is_hidden_stops_who_relies_on_it(author: Author, use: str) -> None:
    author.store.delete(prune_key(2))
    with pytest.raises(StaleChainError, match=r"prune record 1 as the newest.* names 2"):
        tag(author, "new", 2) if use == "tag" else USES[use](author)
    assert author.store.find(tag_key("new", 0)) is None
    assert author.store.find(prune_key(3)) is None


def test_a_tag_that_went_back_is_right_once_it_is_set_again(author: Author) -> None:
    for version in (0, 2, 3):
        tag(author, "prod", version)
    beat(author)  # of record 4
    for number in (2, 3, 4):
        author.store.delete(tag_key("prod", number))
    with pytest.raises(StaleChainError):
        tags.read(reader_of(author), "prod")
    tag(author, "prod", 3)  # which record 1 says as well
    found = present(tags.read(reader_of(author), "prod"))
    assert (found.number, found.version) == (5, 3)
    author.store.delete(tag_key("old", 1))
    tags.remove(author.chain, "old", time=2.0)
    assert tags.read(reader_of(author), "old") is None


@pytest.mark.parametrize(
    ("age", "words"), [(None, "has no heartbeat"), (LIMIT_S + 1, "61 s old, more than 60 s")]
)
def test_with_a_limit_of_age_a_tag_needs_a_sign(
    author: Author, age: float | None, words: str
) -> None:
    chain = reader_of(author, replace(READER, max_age_s=LIMIT_S))
    assert choose(chain, VersionChoice(tag="prod")).version == 3
    if age is None:
        author.store.delete(HEARTBEAT_KEY)
    else:
        beat(author, age=age)
    with pytest.raises(StaleChainError, match=words):
        choose(chain, VersionChoice(tag="prod"))


def test_with_a_limit_of_age_an_old_heartbeat_that_is_shown_again_hides_nothing() -> None:
    author = Author().grow(3)
    tag(author, "prod", 1)
    beat(author, age=LIMIT_S + 1)
    shown = author.store.get(HEARTBEAT_KEY)
    tag(author, "prod", 2)
    beat(author)
    author.store.delete(tag_key("prod", 1))
    author.store.put(HEARTBEAT_KEY, shown)
    assert choose(reader_of(author), VersionChoice(tag="prod")).version == 1  # no limit: unseen
    with pytest.raises(StaleChainError, match="s old"):
        choose(reader_of(author, replace(READER, max_age_s=LIMIT_S)), VersionChoice(tag="prod"))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda author: author.store.delete(HEARTBEAT_KEY), "has no heartbeat"),
        (lambda author: beat(author, age=heartbeat.YOUNG_S + 9), "heartbeat that is 309 s old"),
        (None, ""),
    ],
)
def test_without_a_limit_of_age_a_tag_that_nothing_proves_is_told(
    author: Author,
    spoil: Callable[[Author], object] | None,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for trust in (READER, Trust()):
        if spoil is not None:
            spoil(author)
        caplog.clear()
        assert choose(reader_of(author, trust), VersionChoice(tag="prod")).version == 3
        told = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
        assert len(told) == (1 if words and trust.trusted else 0)
        assert all(words in one and "record 1 of tag 'prod' is the newest" in one for one in told)


def test_a_tag_that_went_back_with_its_heartbeat_is_told_by_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok("keygen", tmp_path / "key")
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(tmp_path / "key"))
    url, state = tmp_path / "chain", random_state()
    for number in range(2):
        ok("push", write_checkpoint(tmp_path / f"step-{number}", state), url)
        ok("tag", url, "prod")
        state = train(state, number)
    public = SigningKey.load(tmp_path / "key").public
    monkeypatch.delenv("DELTACHAIN_SIGNING_KEY")
    monkeypatch.setenv("DELTACHAIN_TRUSTED_KEYS", str(public))
    for file in (tag_key("prod", 1), HEARTBEAT_KEY):
        (url / file).unlink(missing_ok=True)
    done = ok("pull", url, "--tag", "prod", "--out", tmp_path / "out")
    assert "warning  " in done.stderr
    assert "nothing proves that record 0 of tag 'prod' is the newest" in done.stderr
    assert "nothing proves that these records are the newest" in ok("tag", url).stderr
    monkeypatch.setenv("DELTACHAIN_MAX_HEARTBEAT_AGE_S", "300")
    done = invoke("pull", url, "--tag", "prod", "--out", tmp_path / "other")
    assert done.code == 4
    assert "has no heartbeat" in done.stderr


def test_a_heartbeat_that_names_no_tags_is_not_enough_with_a_limit_of_age(author: Author) -> None:
    found = present(read_heartbeat(reader_of(author)))
    chain = author.chain.identity.chain
    author.store.put(HEARTBEAT_KEY, OWNER.seal(changed(found, tags=None), chain))
    assert choose(reader_of(author), VersionChoice(tag="prod")).version == 3
    with pytest.raises(StaleChainError, match="names no tags"):
        choose(reader_of(author, replace(READER, max_age_s=LIMIT_S)), VersionChoice(tag="prod"))


@pytest.mark.parametrize("restarts", [False, True])
def test_a_publisher_goes_on_naming_a_record_that_its_store_hides(
    author: Author, restarts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    newest = beat(author)
    author.store.delete(tag_key("prod", 1))
    author.store.delete(prune_key(2))
    caplog.clear()
    for _ in range(2):
        newest = beat(author, None if restarts else newest)
        restarts = False
    assert (newest.tags, newest.prune) == ({"old": 1, "prod": 1}, 2)
    with pytest.raises(StaleChainError):
        tags.read(reader_of(author), "prod")
    told = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(told) == 1
    assert "newest record of prune record 2, tag 'prod'" in told[0]


def test_a_heartbeat_names_only_records_that_a_trusted_key_signed(author: Author) -> None:
    newest = beat(author)
    chain = author.chain.identity.chain
    author.store.put(tag_key("prod", 2), author.store.get(tag_key("prod", 1)))
    mallory = trust_of(9, key=9)
    record = PruneRecord(chain=chain, number=3, head=0, maintainer="m", time=1.0, pruned=())
    author.store.put(prune_key(3), mallory.seal(record, chain))
    beat(author, newest)
    found = present(read_heartbeat(reader_of(author)))
    assert (found.tags, found.prunes) == ({"old": 1, "prod": 1}, 3)


def test_a_publisher_names_what_came_since_its_last_heartbeat(author: Author) -> None:
    thread = HeartbeatThread(writer_of(author), leads=True, every_s=0.02)
    try:
        tag(author, "new", 2)
        eventually(lambda: "new" in (present(read_heartbeat(reader_of(author))).tags or {}))
    finally:
        thread.close()


def test_more_tags_than_a_heartbeat_can_name_are_told(
    author: Author, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "MAX_HEARTBEAT", 600)
    assert author.parent is not None
    names = {f"tag-{number}": 0 for number in range(30)}
    with pytest.raises(ChainError, match="30 tags do not fit into a heartbeat of 600 bytes"):
        write_heartbeat(author.chain, author.parent, now=1.0, tags=names)


def test_a_mirror_has_the_heartbeat_once_it_has_all_that_it_names(author: Author) -> None:
    there = MemoryStore()
    mirror = Mirror(author.store, there, trust=READER)
    for _ in range(12):
        list(mirror.catch_up())
    chain = Chain.open(there, replace(READER, max_age_s=LIMIT_S, mirror=True))
    assert choose(chain, VersionChoice(tag="prod")).version == 3
    author.grow(1)
    tag(author, "prod", 4)
    beat(author)
    for _ in range(12):
        list(mirror.catch_up())
        choose(chain, VersionChoice(tag="prod"))  # never ahead of the tags
    assert there.get(HEARTBEAT_KEY) == author.store.get(HEARTBEAT_KEY)
    assert choose(chain, VersionChoice(tag="prod")).version == 4
    author.store.put(HEARTBEAT_KEY, b"{}")
    for _ in range(12):
        list(mirror.catch_up())
    assert read_heartbeat(chain) is not None


COUNTS = st.integers(0, (1 << 63) - 1)
TEXTS = st.text(max_size=20)
PAIRS = st.dictionaries(TEXTS, TEXTS, max_size=3)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "ext": st.dictionaries(TEXTS, st.recursive(st.none() | TEXTS | FLOATS, st.lists, max_leaves=4)),
    **dict.fromkeys(("metadata", "aliases"), PAIRS),
    **dict.fromkeys(("chain", "commit_id", "parent", "base_state"), TEXTS),
    **dict.fromkeys(("created", "time"), FLOATS),
    **dict.fromkeys(("epoch", "nnz", "numel"), COUNTS),
    "step": st.none() | st.integers(-(10**30), 10**30),
}
"""What any document may say in a field of this name."""

MANIFESTS = [unseal(file.read_bytes(), Manifest, key="k") for file in CHAIN.glob("manifests/*")]
DOCUMENTS = [*(read(name, frozen(name)) for name in FILES), *MANIFESTS]


@pytest.mark.full
@settings(max_examples=150)
@given(st.sampled_from(DOCUMENTS), st.data())
def test_documents_survive_and_have_one_form(document: Document, data: st.DataObject) -> None:
    names = [name for name in document.__struct_fields__ if name in FIELDS]
    document = changed(document, **{name: data.draw(FIELDS[name], name) for name in names})
    bare, sealed = dump(document), seal(document)
    spaced = json.dumps(json.loads(bare), indent=3, sort_keys=True).encode()
    assert bare in sealed
    assert parse(spaced, type(document), key="k") == document
    for found in (parse(bare, type(document), key="k"), unseal(sealed, type(document), key="k")):
        assert found == document
        assert (dump(found), seal(found)) == (bare, sealed)


def test_a_manifest_sums_up_its_own_edge() -> None:
    for manifest in MANIFESTS:
        found, edge = manifest.summary(), manifest.edge
        assert found == summarise(manifest.version, edge, manifest.state)
        assert found.nbytes == sum(part.nbytes for part in edge.parts)
        assert found.parts == len(edge.parts)
        assert (found.record, found.digest, found.base) == ("", "", edge.base)


def test_documents_can_not_be_changed() -> None:
    with pytest.raises(AttributeError):
        Head(version=3).version = 4  # type: ignore[misc]
