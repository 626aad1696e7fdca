"""What goes wrong under a real server: it says so, and never serves a mixture."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.engines.replica import Replica, error_of, replicas

pytestmark = pytest.mark.engine

TOKEN = "the-token"  # noqa: S105 - of a server that nobody else reaches
KEY = "the-key"


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["tp1", "tp2"]
)
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replica]:
    folder = tmp_path_factory.mktemp(f"tp{request.param}")
    environment = {"DELTACHAIN_TOKEN": TOKEN}
    with replicas(folder, request.param, environment=environment, key=KEY) as replica:
        yield replica


@contextmanager
def instead(file: Path, content: bytes | None) -> Iterator[None]:
    before = file.read_bytes()
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    yield
    file.write_bytes(before)


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("damage", "code", "kind"),
    [
        (flipped, 502, "DigestMismatchError"),
        (lambda content: content[:-100], 502, "MalformedError"),
        (lambda _: None, 503, "ObjectNotFoundError"),
    ],
    ids=["corrupt", "truncated", "gone"],
)
def test_an_object_that_can_not_be_used_changes_nothing(
    replica: Replica, damage: object, code: int, kind: str
) -> None:
    assert callable(damage)
    old = replica.trainer.head
    new = replica.trainer.step()
    payload = replica.payload(new)
    with instead(payload, damage(payload.read_bytes())):
        error = error_of(replica.server.post("update"), code)
        assert error["type"] == kind
        assert f"{new:020d}" in error["message"]
        assert error["message"] in replica.server.status()["trouble"]
        assert replica.holds(old)
        assert replica.serves(old)


def test_a_rank_that_refuses_to_stage_is_every_ranks_refusal(replica: Replica) -> None:
    old = replica.trainer.head
    replica.trainer.step()
    replica.strike("stage")
    error = error_of(replica.server.post("update"), 409)
    assert replica.is_struck()
    assert f"rank {replica.tp - 1}: RuntimeError: struck at stage" in error["message"]
    assert replica.holds(old)
    assert replica.serves(old)


def test_a_rank_that_fails_in_the_middle_of_a_swap_is_taken_back_on_all(replica: Replica) -> None:
    old = replica.trainer.head
    replica.trainer.step()
    replica.strike("write", nth=4)
    error = error_of(replica.server.post("update"), 409)
    assert replica.is_struck()
    assert error["type"] == "PartialApplyError"
    assert f"rank {replica.tp - 1}" in error["message"]
    assert "struck at write" in error["message"]
    assert replica.holds(old)
    assert replica.serves(old)


def test_a_rank_that_can_not_go_back_either_stops_the_replica_until_it_is_healed(
    replica: Replica,
) -> None:
    new = replica.trainer.step()
    replica.strike("write", nth=4, lasting=True)
    assert error_of(replica.server.post("update"), 409)["type"] == "PoisonedError"
    status = replica.server.status()
    assert (status["poisoned"], status["version"], status["ready"]) == (True, None, False)
    assert "struck at write" in status["trouble"]
    assert replica.stands_still()
    replica.strikes.unlink()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(replica.server.generate, [9, 8, 7], 8)
        assert replica.server.update()["version"] == new
        # It waited, and not one of its tokens is from weights that nobody can account for.
        assert asked.result().spans == ((0, 8, str(new)),)
    assert replica.holds(new)


def test_weights_that_somebody_else_wrote_are_healed_by_the_next_update(replica: Replica) -> None:
    replica.server.reset()
    new = replica.trainer.step()
    status = replica.server.update()
    assert (status["version"], status["last"]["previous"]) == (new, None)
    assert replica.holds(new)
    assert replica.serves(new)


def test_weights_that_somebody_else_wrote_are_found_by_scrubbing(replica: Replica) -> None:
    head = replica.trainer.head
    replica.server.reset()
    status = replica.server.post("scrub").json()
    assert (status["version"], status["poisoned"], status["last"]["previous"]) == (
        head,
        False,
        None,
    )
    assert replica.holds(head)
    assert replica.serves(head)


def test_a_replica_that_can_not_be_healed_stands_still_until_it_can(replica: Replica) -> None:
    head = replica.trainer.head
    replica.server.reset()
    with instead(replica.payload(head), None):
        for path in ("scrub", "update"):
            error = error_of(replica.server.post(path), 503)
            assert error["type"] == "ObjectNotFoundError"
            status = replica.server.status()
            assert (status["poisoned"], status["version"]) == (True, None)
            assert error["message"] in status["trouble"]
            assert replica.stands_still()
    assert replica.server.update()["version"] == head
    assert replica.holds(head)
    assert replica.serves(head)


def test_a_rollback_stays_until_it_is_released(replica: Replica) -> None:
    old = replica.trainer.head
    new = replica.trainer.step()
    replica.server.update()
    assert replica.server.post("rollback", version=old).json()["version"] == old
    replica.server.update()
    assert replica.holds(old)
    assert replica.serves(old)
    replica.server.post("release")
    replica.server.update()
    assert replica.holds(new)


def test_what_others_paused_stays_paused_through_an_update(replica: Replica) -> None:
    server, new = replica.server, replica.trainer.step()
    server.halt()
    found = server.wait_for(lambda status: not status["ready"])
    assert (found["reason"], found["paused"]) == ("paused by another client", True)
    assert server.readiness() == {503}
    status = server.update(new)
    assert (status["ready"], status["reason"]) == (False, "paused by another client")
    assert server.paused()
    server.go_on()
    assert replica.holds(new)
    server.wait_for(lambda status: status["ready"])
    assert replica.serves(new)


def test_a_paused_replica_is_updated_and_stays_paused(replica: Replica) -> None:
    replica.server.post("pause")
    new = replica.trainer.step()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(replica.server.generate, [9, 8, 7], 8)
        status = replica.server.update()
        assert (status["ready"], status["reason"]) == (False, "paused")
        assert replica.server.paused()
        assert not asked.done()
        replica.server.post("resume")
        assert asked.result().spans == ((0, 8, str(new)),)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 401),
        ({"authorization": f"Bearer {KEY}"}, 401),
        ({"x-deltachain-token": TOKEN}, 401),
        ({"authorization": f"Bearer {KEY}", "x-deltachain-token": "another"}, 401),
        ({"authorization": "Bearer another", "x-deltachain-token": TOKEN}, 401),
        ({"authorization": f"Bearer {KEY}", "x-deltachain-token": "schlüssel"}, 401),
        ({"authorization": f"Bearer {KEY}", "x-deltachain-token": TOKEN}, 200),
    ],
)
@pytest.mark.parametrize("path", ["status", "ready", "update"])
def test_key_and_token_are_both_asked_for(
    shared: Replica, path: str, headers: dict[str, str], code: int
) -> None:
    client = shared.server.client
    request = client.build_request(
        "POST" if path == "update" else "GET", f"{shared.server.prefix}/{path}"
    )
    for name in ("authorization", "x-deltachain-token"):
        del request.headers[name]
    request.headers = httpx.Headers({**request.headers, **headers}, encoding="latin-1")
    assert client.send(request).status_code == code


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"version": 1' + b" " * 5000 + b"}", 413),
        (b"[" * 4000, 422),
        (b"not json", 422),
        (b'{"version": "1"}', 422),
        (b'{"version": -1}', 422),
        (b'{"version": 1.5}', 422),
        (b'{"version": true}', 422),
        (b'{"version": 9007199254740992}', 422),
        (b'{"url": "file:///etc"}', 422),
        (b'{"version": 4000}', 409),
    ],
)
@pytest.mark.parametrize("path", ["update", "rollback"])
def test_a_request_that_says_anything_else_is_refused(
    shared: Replica, path: str, body: bytes, code: int
) -> None:
    head = shared.trainer.head
    assert (
        shared.server.client.post(f"{shared.server.prefix}/{path}", content=body).status_code
        == code
    )
    assert shared.holds(head)


def test_a_store_that_is_away_changes_nothing(replica: Replica) -> None:
    head = replica.trainer.head
    away = replica.store.with_name("away")
    shutil.move(replica.store, away)
    try:
        error = error_of(replica.server.post("update", version=head + 1), 503)
        assert (error["type"], error["retryable"]) == ("StoreUnavailableError", True)
        assert "the folder was there, and is not any more" in error["message"]
        assert replica.serves(head)
    finally:
        shutil.move(away, replica.store)
    assert replica.holds(head)
