"""A source that was restored from a backup, and has other records since under the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import pytest

from deltachain.chain import tags
from deltachain.chain.trust import Trust
from deltachain.errors import ForkedChainError
from deltachain.format.documents import PruneRecord
from deltachain.format.keys import prune_key, tag_key
from deltachain.mirror import Mirror, follow
from deltachain.mirror import mirror as loop
from deltachain.store import MemoryStore
from tests.hostile.signed import NOBODY, OWNER, Author, objects, resign, trust_of

CHAIN = f"{7:032x}"
Write = Callable[[Author, float], str]


@pytest.fixture(autouse=True)
def _surveys_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SURVEY", 1)


def write_tag(author: Author, time: float) -> str:
    tag = tags.set_(author.chain, "best", author.chain.read(int(time) % 3), time=time)
    return tag_key("best", tag.number)


def write_prune(author: Author, time: float) -> str:
    """Write the next prune record, as a maintainer of its own."""
    number = 0
    while author.store.find(prune_key(number)):
        number += 1
    record = PruneRecord(chain=CHAIN, number=number, head=2, maintainer=f"{time}", time=time)
    author.store.put(prune_key(number), author.chain.trust.seal(record, CHAIN))
    return prune_key(number)


def restore(store: MemoryStore, backup: dict[str, bytes]) -> None:
    for key in objects(store).keys() - backup.keys():
        store.delete(key)


@pytest.fixture(params=[write_tag, write_prune])
def write(request: pytest.FixtureRequest) -> Write:
    found: Write = request.param
    return found


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("owner", "reader"), [(NOBODY, NOBODY), (OWNER, trust_of(1))])
def test_other_records_under_the_same_numbers_are_named(
    write: Write, owner: Trust, reader: Trust, restarts: bool
) -> None:
    author, there = Author(owner).grow(4), MemoryStore()
    source = author.store
    write(author, 0.0)
    backup = objects(source)
    lost = [write(author, time) for time in (1.0, 2.0)]
    mirror = Mirror(source, there, trust=reader)
    list(mirror.catch_up())
    assert there.get(lost[1]) == source.get(lost[1])
    restore(source, backup)
    list(mirror.catch_up())  # nothing was written since: the mirror is ahead
    again = [write(author, time) for time in (4.0, 5.0, 6.0)]
    assert again[:2] == lost
    mirror = Mirror(source, there, trust=reader) if restarts else mirror
    with pytest.raises(ForkedChainError, match=lost[1]) as caught:
        list(mirror.catch_up())
    assert there.find(again[2]) is None
    assert "remove this record and later ones" in caught.value.hint
    for key in lost:
        there.delete(key)
    list(Mirror(source, there, trust=reader).catch_up())
    assert all(there.get(key) == source.get(key) for key in again)


def test_a_mirror_that_follows_ends(write: Write) -> None:
    author, there = Author(OWNER).grow(4), MemoryStore()
    backup = objects(author.store)
    write(author, 1.0)
    list(Mirror(author.store, there, trust=trust_of(1)).catch_up())
    restore(author.store, backup)
    write(author, 2.0)
    with pytest.raises(ForkedChainError, match=r"has another (tags|prunes)/"):
        list(follow(Mirror(author.store, there, trust=trust_of(1)), stop=Event(), poll_s=0.01))


def test_what_no_trusted_key_signed_is_not_compared(write: Write) -> None:
    """Else whoever can write to the source could end every mirror of it."""
    author, there = Author(OWNER).grow(4), MemoryStore()
    key = write(author, 1.0)
    list(Mirror(author.store, there, trust=trust_of(1)).catch_up())
    kept = there.get(key)
    author.store.delete(key)
    assert write(author, 2.0) == key
    resign(author.store, key, [])
    list(Mirror(author.store, there, trust=trust_of(1)).catch_up())
    assert there.get(key) == kept
