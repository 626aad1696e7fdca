"""The record of the publisher at work: whom it refuses, whom it lets go on, and whom it names."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from unittest import mock

import httpx
import pytest
from msgspec.structs import replace

from deltachain.chain.chain import Chain
from deltachain.errors import PublisherFencedError
from deltachain.format.documents import dump
from deltachain.format.keys import PUBLISHER_KEY, manifest_key
from deltachain.publish import PublishConfig, Publisher, publisher_record
from deltachain.publish.publisher_record import (
    PublisherRecord,
    new_record,
    read_record,
    write_record,
)
from deltachain.publish.revert import revert
from deltachain.store import MemoryStore, open_store
from tests.support.faults import Fault, FaultyStore
from tests.support.models import plain_model, train_
from tests.support.values import eventually, present
from tests.unit.publish.chains import Attach, NewThreads, publish, served


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_record, "RENEW_S", 0.02)
    monkeypatch.setattr(publisher_record, "LOOKS_EVERY", 1)
    monkeypatch.setattr(publisher_record, "WATCH_S", 0.5)
    monkeypatch.setattr(publisher_record, "LOOK_S", 0.01)


def elsewhere(**changes: object) -> PublisherRecord:
    """The record of a publisher on another machine."""
    values = {"host": "gpu-7", "pid": 4242, "machine": "another", "since": 1.0} | changes
    return replace(new_record(None), **values)


@pytest.fixture
def chain(store: MemoryStore, attach: Attach) -> MemoryStore:
    """A store whose chain has one version, of a publisher that was closed."""
    attach(plain_model()).close()
    return store


@pytest.fixture
def healthy(chain: MemoryStore) -> Iterator[PublisherRecord]:
    """A publisher on another machine, which renews its record as ours does."""
    record, stop = elsewhere(turn=9), Event()

    def renew() -> None:
        now = record
        while not stop.wait(0.02):
            now = write_record(chain, now)

    write_record(chain, record)
    thread = Thread(target=renew)
    thread.start()
    yield record
    stop.set()
    thread.join()


def manifests(store: MemoryStore) -> list[str]:
    return [info.key for info in store.list("manifests/")]


def test_a_second_publisher_is_refused_while_another_one_is_at_work_unless_it_is_told_to(
    attach: Attach, chain: MemoryStore, healthy: PublisherRecord, caplog: pytest.LogCaptureFixture
) -> None:
    before = manifests(chain)
    with pytest.raises(PublisherFencedError) as refused:
        attach(plain_model())
    assert "process 4242 on host gpu-7, since 1970-01-01 00:00:01 UTC" in str(refused.value)
    assert "take_over=True" in refused.value.hint
    assert manifests(chain) == before
    assert present(read_record(chain)).publisher == healthy.publisher
    assert attach(plain_model(), take_over=True).version == 1
    assert f"takes {chain.url} over from {healthy}" in caplog.text


def test_one_that_was_killed_here_or_closed_is_followed_at_once(
    attach: Attach, chain: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_record.Tenure, "_watch", None)
    assert present(read_record(chain)).ended
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    write_record(chain, replace(new_record(None), pid=killed.pid, started="12345"))
    publisher = attach(plain_model())
    assert publisher.version == 1
    publisher.close()
    write_record(chain, elsewhere(ended=True))
    assert attach(plain_model()).version == 2


def test_one_whose_number_another_process_has_by_now_is_gone() -> None:
    assert replace(new_record(None), started="1").is_gone
    assert not new_record(None).is_gone


def test_one_that_was_killed_elsewhere_is_followed_after_a_look(
    attach: Attach, chain: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    write_record(chain, elsewhere())
    with caplog.at_level(logging.INFO):
        assert attach(plain_model()).version == 1
    assert "which gives no sign of life" in caplog.text


def test_one_that_ends_meanwhile_is_followed(attach: Attach, chain: MemoryStore) -> None:
    write_record(chain, record := elsewhere())

    def end(_: float) -> None:
        write_record(chain, replace(record, ended=True))

    with mock.patch("deltachain.publish.publisher_record.time.sleep", end):
        assert attach(plain_model()).version == 1


def test_an_old_record_is_not_waited_for(
    attach: Attach, chain: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(chain, elsewhere())
    monkeypatch.setattr(chain, "clock", lambda: 1e10)
    monkeypatch.setattr(publisher_record, "WATCH_S", 1e6)
    assert attach(plain_model()).version == 1


def test_the_fenced_publisher_says_who_came_after_it(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain_model()
    one = attach(model)
    monkeypatch.setattr(
        publisher_record, "new_record", lambda before: elsewhere(turn=before.turn + 1)
    )
    attach(plain_model())
    train_(model, 1)
    with pytest.raises(PublisherFencedError, match="taken over by process 4242 on host gpu-7"):
        one.publish(step=1).result()


def test_an_idle_publisher_is_told_before_its_next_version(
    attach: Attach, chain: MemoryStore, caplog: pytest.LogCaptureFixture, new_threads: NewThreads
) -> None:
    caplog.set_level("INFO")
    attach(plain_model(), metrics="0")
    (renewing,) = new_threads("deltachain-tenure")
    ready = served(caplog) + "/readyz"
    assert httpx.get(ready).status_code == 200
    write_record(chain, elsewhere(turn=present(read_record(chain)).turn + 1))
    renewing.join(timeout=60)  # it has nothing more to renew
    assert "was taken over by process 4242 on host gpu-7" in caplog.text
    assert "was taken over by process 4242 on host gpu-7" in httpx.get(ready).text
    assert present(read_record(chain)).pid == 4242


def test_an_idle_publisher_says_that_its_chain_was_reverted_or_lost(
    attach: Attach, chain: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = plain_model()
    publish(attach(model, metrics="0"), model, 1)

    def says(text: str, status: int) -> None:
        eventually(lambda: httpx.get(served(caplog) + "/readyz").status_code == status)
        eventually(lambda: text in httpx.get(served(caplog) + "/readyz").text)

    newest, following = manifests(chain)[-1], manifest_key(3)
    kept = chain.get(newest)
    chain.delete(newest)
    says("lost version 2, which this publisher committed", 503)
    for damaged in (b"{}", kept[: len(kept) // 2]):
        chain.put(newest, damaged)
        says(newest, 503)
    chain.put(newest, kept)
    says("", 200)
    chain.put(following, b"junk")
    says(following, 503)
    chain.delete(following)
    says("", 200)
    back = Chain.open(chain)
    revert(back, back.read(1))
    says("another publisher committed version 3", 503)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{" * 4000,
        b"x" * 100_000,
        dump(elsewhere()).replace(b"gpu-7", rb"a\u001b[2J"),
        dump(elsewhere(since=77.0)).replace(b"77.0", b"1e300"),
        dump(elsewhere()).replace(b"4242", b"-1"),
    ],
)
def test_a_record_that_cannot_be_read_stops_nobody(
    attach: Attach, chain: MemoryStore, data: bytes
) -> None:
    chain.put(PUBLISHER_KEY, data)
    assert attach(plain_model()).version == 1


def test_a_store_that_allows_no_record_has_no_other_harm(
    attach: Attach, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultyStore(store, Fault("refuse", PUBLISHER_KEY, times=None))
    assert attach(plain_model(), on=faulty).version == 0
    assert "no record that this publisher is at work:" in caplog.text


PUBLISHES = """
import sys, deltachain
from deltachain.publish import publisher_record
from tests.support.models import plain_model
publisher_record.RENEW_S = 0.05
with deltachain.Publisher(sys.argv[1]).attach(plain_model()):
    print("attached", flush=True)
    sys.stdin.read()
"""


@pytest.mark.full
def test_two_processes_then_one_is_killed(tmp_path: Path) -> None:
    """The healthy one stays in charge; once it is dead, the next one needs no setting."""
    url = str(tmp_path / "chain")
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISHES, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"attached\n"
        with pytest.raises(PublisherFencedError, match=f"process {first.pid} on host"):
            Publisher(PublishConfig(url=url)).attach(plain_model())
        first.kill()
        first.wait()
    with Publisher(PublishConfig(url=url)).attach(plain_model()) as second:
        assert second.version == 1
    found = present(read_record(open_store(url)))
    assert found.ended
