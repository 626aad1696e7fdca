import logging
from collections.abc import Callable
from threading import Event

import pytest

from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.chain.trust import Trust
from deltachain.errors import DeltaChainError, ForkedChainError
from deltachain.format.documents import EdgeRecord, PruneRecord, unseal
from deltachain.format.keys import edge_key, prune_key, tag_key
from deltachain.maintain import Maintainer
from deltachain.mirror import Mirror, follow
from deltachain.mirror import mirror as loop
from deltachain.store import MemoryStore
from tests.hostile.signed import NOBODY, OWNER, Author, resign, trust_of
from tests.support.backup import objects_of, put_back
from tests.unit.maintain.grown import Grown, payloads

CHAIN = f"{7:032x}"
Write = Callable[[Author, float], str]


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
    backup = objects_of(source)
    lost = [write(author, time) for time in (1.0, 2.0)]
    mirror = Mirror(source, there, trust=reader)
    list(mirror.catch_up())
    assert there.get(lost[1]) == source.get(lost[1])
    put_back(source, backup)
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
    backup = objects_of(author.store)
    write(author, 1.0)
    list(Mirror(author.store, there, trust=trust_of(1)).catch_up())
    put_back(author.store, backup)
    write(author, 2.0)
    mirror, stop = Mirror(author.store, there, trust=trust_of(1)), Event()

    def looked(trouble: DeltaChainError | None) -> None:
        if trouble:  # without it, a loop that should have ended would not end
            stop.set()

    with pytest.raises(ForkedChainError, match=r"has another (tags|prunes)/"):
        list(follow(mirror, stop=stop, poll_s=0.01, looked=looked))


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


SKIP = edge_key(16, "skip", 8)


@pytest.fixture(autouse=True)
def _surveys_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SURVEY", 1)


@pytest.fixture
def grown() -> Grown:
    """A chain whose skips no manifest lists."""
    made = Grown(MemoryStore())
    made.grow(40)
    Maintainer(Chain.open(made.store), None).round()
    return made


def make_again(grown: Grown, key: str) -> None:
    """Lose an edge record; a maintainer makes another one, with parts of its own."""
    before = grown.store.get(key)
    grown.store.delete(key)
    Maintainer(Chain.open(grown.store), None).round()
    assert grown.store.get(key) != before


class Hiding(MemoryStore):
    """A store that lists an object, and does not have it when it is read."""

    hidden = ""

    def get(self, key: str, *, limit: int = 1 << 26) -> bytes:
        if key == self.hidden:
            self.delete(key)
        return super().get(key, limit=limit)


def test_a_record_that_comes_back_is_copied(caplog: pytest.LogCaptureFixture) -> None:
    grown, there = Grown(Hiding()), MemoryStore()
    grown.grow(40)
    Maintainer(Chain.open(grown.store), None).round()
    data = grown.store.get(SKIP)
    assert isinstance(grown.store, Hiding)
    grown.store.hidden = SKIP
    mirror = Mirror(grown.store, there)
    list(mirror.catch_up())
    assert f"{SKIP} is gone from" in caplog.text
    assert there.find(SKIP) is None
    grown.store.hidden = ""
    grown.store.put(SKIP, data)
    list(mirror.catch_up())
    assert there.get(SKIP) == data
    assert payloads(there) == payloads(grown.store)


def test_a_record_that_is_signed_later_is_copied(caplog: pytest.LogCaptureFixture) -> None:
    """Until then it is named once."""
    author, there = Author(OWNER).grow(3).anchor(), MemoryStore()
    source, key = author.store, edge_key(2, "anchor", None)
    data = source.get(key)
    resign(source, key, [])
    mirror = Mirror(source, there, trust=trust_of(1))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            list(mirror.catch_up())
    assert there.find(key) is None
    assert [key in message for message in caplog.messages] == [True]
    source.put(key, data)
    list(mirror.catch_up())
    assert there.get(key) == data


@pytest.mark.parametrize("restarts", [False, True])
def test_a_record_that_was_made_again_ends_no_mirror(
    grown: Grown, caplog: pytest.LogCaptureFixture, restarts: bool
) -> None:
    """The mirror keeps the first one, which leads to the same state, and says so once."""
    there = MemoryStore()
    mirror = Mirror(grown.store, there)
    list(mirror.catch_up())
    first = there.get(SKIP)
    make_again(grown, SKIP)
    mirror = Mirror(grown.store, there) if restarts else mirror
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            grown.grow(1)
            list(mirror.catch_up())
    assert mirror.version == grown.head
    assert there.get(SKIP) == first
    assert [SKIP in message for message in caplog.messages] == [True]
    parts = unseal(first, EdgeRecord, key=SKIP).edge.parts
    assert parts
    assert {part.key for part in parts} <= payloads(there).keys()


def test_a_damaged_record_of_the_mirror_is_named(
    grown: Grown, caplog: pytest.LogCaptureFixture
) -> None:
    there = MemoryStore()
    list(Mirror(grown.store, there).catch_up())
    there.put(SKIP, b"{}")
    there.delete(next(key for key in payloads(there) if key.startswith(f"skips/{16:020d}")))
    mirror = Mirror(grown.store, there)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            list(mirror.catch_up())
    assert there.get(SKIP) == b"{}"
    assert [SKIP in message for message in caplog.messages] == [True]
