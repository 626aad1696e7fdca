"""Signed chains whose store shows older tags and prune records than the heartbeat names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from deltachain.chain import heartbeat, tags
from deltachain.chain.chain import Chain
from deltachain.chain.heartbeat import newest_prune, read_heartbeat, write_heartbeat
from deltachain.chain.tags import VersionChoice, choose, sign_again
from deltachain.chain.trust import SigningKey, Trust
from deltachain.errors import ChainError, StaleChainError
from deltachain.format.documents import PruneRecord
from deltachain.format.keys import HEARTBEAT_KEY, prune_key, tag_key
from deltachain.maintain import KeepRule, Pruner
from deltachain.maintain.survey import Survey
from deltachain.mirror import Mirror
from deltachain.publish.beside import HeartbeatThread, NewestRecords
from deltachain.publish.writer import Writer
from deltachain.store import MemoryStore
from tests.hostile.signed import OWNER, SPEC, Author, trust_of
from tests.support.values import present
from tests.unit.cli.support import invoke, ok, random_state, train, write_checkpoint

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


def test_a_removed_tag_does_not_come_back(author: Author) -> None:
    author.store.delete(tag_key("old", 1))
    for read in (lambda chain: tags.read(chain, "old"), tags.read_all):
        with pytest.raises(StaleChainError, match="record 0 of tag 'old'"):
            read(reader_of(author))


def test_a_tag_that_is_hidden_altogether_is_missed(author: Author) -> None:
    for number in range(2):
        author.store.delete(tag_key("prod", number))
    for read in (lambda chain: tags.read(chain, "prod"), tags.read_all):
        with pytest.raises(StaleChainError, match="record -1 of tag 'prod'"):
            read(reader_of(author))


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
        deadline = time.monotonic() + 20
        while (found := read_heartbeat(reader_of(author))) and "new" not in (found.tags or {}):
            assert time.monotonic() < deadline
            time.sleep(0.005)
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
