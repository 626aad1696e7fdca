import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any, Protocol

import httpx
import pytest
from fastapi.testclient import TestClient

from game import TURNS, secret_of
from server import LARGEST, WORDS, main, make_app, read_words
from sessions import IDLE_S, LIMIT, Sessions

LIST = read_words(WORDS)
SERVER = WORDS.with_name("server.py")


class Answer(Protocol):
    @property
    def status_code(self) -> int: ...

    def json(self) -> Any: ...


class Clock:
    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(clock: Clock) -> Iterator[TestClient]:
    with TestClient(make_app(Sessions(LIST, clock=clock))) as client:
        yield client


def begin(client: TestClient, seed: int | None = 7) -> str:
    answer = client.post("/sessions", json={"seed": seed})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["session"])


def guess(client: TestClient, session: str, word: str) -> dict[str, Any]:
    answer = client.post(f"/sessions/{session}/guess", json={"word": word})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refusal(answer: Answer) -> int:
    error = answer.json()["error"]
    assert error.keys() == {"message", "hint"}
    assert all(error.values())
    return answer.status_code


def test_a_game_is_won(client: TestClient) -> None:
    opened = client.post("/sessions", json={"seed": 7}).json()
    session = opened.pop("session")
    assert opened == {"observation": "guess:", "turns_left": TURNS}
    secret = secret_of(7, LIST)
    assert guess(client, session, "zzzzz") == {
        "observation": " = ?\nguess:",
        "reward": 0.0,
        "done": False,
        "turns_left": 3,
    }
    assert guess(client, session, f" {secret.upper()} ") == {
        "observation": " = g g g g g\n",
        "reward": 0.9,
        "done": True,
        "turns_left": 2,
    }


def test_what_is_not_there_is_404(client: TestClient) -> None:
    assert refusal(client.post("/sessions/none/guess", json={"word": "crane"})) == 404
    assert refusal(client.delete("/sessions/none")) == 404
    assert refusal(client.get("/elsewhere")) == 404
    assert refusal(client.get("/sessions")) == 405


def test_a_game_that_is_done_is_409(client: TestClient) -> None:
    session = begin(client)
    guess(client, session, secret_of(7, LIST))
    assert refusal(client.post(f"/sessions/{session}/guess", json={"word": "crane"})) == 409
    assert client.delete(f"/sessions/{session}").status_code == 204
    assert refusal(client.post(f"/sessions/{session}/guess", json={"word": "crane"})) == 404


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"crane",
        b"[]",
        b"null",
        b"{}",
        b'{"word": null}',
        b'{"word": 7}',
        b'{"word": ["crane"]}',
        b'{"word": "crane", "more": 1}',
        b'{"word": "\\ud800"}',
        b'{"word": "\xff"}',
        b'{"word": "crane"',
    ],
)
def test_a_malformed_guess_is_422_and_costs_nothing(client: TestClient, body: bytes) -> None:
    session = begin(client)
    assert refusal(client.post(f"/sessions/{session}/guess", content=body)) == 422
    assert guess(client, session, "zzzzz")["turns_left"] == 3


@pytest.mark.parametrize(
    "body", [b"", b"7", b'{"seed": "7"}', b'{"seed": 7.5}', b'{"seed": true}', b'{"sed": 7}']
)
def test_a_malformed_opening_is_422_and_takes_no_place(client: TestClient, body: bytes) -> None:
    assert refusal(client.post("/sessions", content=body)) == 422
    assert client.get("/healthz").json() == {"sessions": 0, "limit": LIMIT}


def test_a_large_body_is_413(client: TestClient) -> None:
    def padded(size: int) -> bytes:
        return b'{"seed": 7}'.ljust(size)

    assert client.post("/sessions", content=padded(LARGEST)).status_code == 201
    assert refusal(client.post("/sessions", content=padded(LARGEST + 1))) == 413
    session = begin(client)
    large = b'{"word": "' + b"a" * LARGEST + b'"}'
    assert refusal(client.post(f"/sessions/{session}/guess", content=large)) == 413


@pytest.mark.full
def test_256_play_at_once_and_the_257th_is_told_to_wait(client: TestClient) -> None:
    barrier = Barrier(32)

    def rollouts(first: int) -> list[str]:
        barrier.wait()
        sessions = {seed: begin(client, seed) for seed in range(first, first + 8)}
        for _ in range(TURNS - 1):
            for session in sessions.values():
                assert guess(client, session, "zzzzz")["observation"] == " = ?\nguess:"
        for seed, session in sessions.items():
            last = guess(client, session, secret_of(seed, LIST))
            assert (last["reward"], last["done"]) == (0.7, True)
        return list(sessions.values())

    with ThreadPoolExecutor(32) as pool:
        names = [n for each in pool.map(rollouts, range(0, LIMIT, 8)) for n in each]
    assert len(set(names)) == LIMIT
    assert client.get("/healthz").json() == {"sessions": LIMIT, "limit": LIMIT}
    refused = client.post("/sessions", json={"seed": 7})
    assert refusal(refused) == 429
    assert refused.headers["retry-after"] == str(int(IDLE_S))
    client.delete(f"/sessions/{names[0]}")
    begin(client)
    assert refusal(client.post("/sessions", json={"seed": 7})) == 429


def test_the_idle_make_place_and_the_busy_stay(client: TestClient, clock: Clock) -> None:
    idle, busy = begin(client), begin(client)
    clock.now += IDLE_S / 2
    for _ in range(LIMIT - 2):
        begin(client)
    clock.now += IDLE_S / 2
    guess(client, busy, "zzzzz")
    refused = client.post("/sessions", json={"seed": 7})
    assert (refusal(refused), refused.headers["retry-after"]) == (429, "1")
    clock.now += 1
    begin(client)
    assert refusal(client.post(f"/sessions/{idle}/guess", json={"word": "crane"})) == 404
    assert guess(client, busy, "zzzzz")["turns_left"] == 2
    assert refusal(client.post("/sessions", json={"seed": 7})) == 429
    clock.now += IDLE_S
    begin(client)
    assert client.get("/healthz").json()["sessions"] == LIMIT


@pytest.mark.full
def test_one_client_locks_nobody_out(clock: Clock) -> None:
    app = make_app(Sessions(LIST, clock=clock))
    with TestClient(app, client=("192.0.2.1", 1)) as greedy:
        codes = [greedy.post("/sessions", json={"seed": 7}).status_code for _ in range(300)]
        assert (codes.count(201), codes.count(429)) == (LIMIT, 300 - LIMIT)
        for address in ("192.0.2.2", "2001:db8::1"):
            with TestClient(app, client=(address, 1)) as other:
                assert guess(other, begin(other), "zzzzz")["turns_left"] == 3


@pytest.mark.parametrize(
    ("proxies", "said", "expected"),
    [
        (0, "203.0.113.9", "192.0.2.1/32"),
        (1, "203.0.113.9", "203.0.113.9/32"),
        (1, "203.0.113.9, 198.51.100.7", "198.51.100.7/32"),
        (2, "203.0.113.9, 198.51.100.7", "203.0.113.9/32"),
        (2, "198.51.100.7", "192.0.2.1/32"),
        (1, "", "nobody"),
        (1, "203.0.113.9:4711", "nobody"),
        (1, "::ffff:203.0.113.9", "203.0.113.9/32"),
        (1, "2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
    ],
)
def test_who_asks_is_what_the_nearest_proxies_say(
    clock: Clock, proxies: int, said: str, expected: str
) -> None:
    sessions = Sessions(LIST, clock=clock)
    with TestClient(make_app(sessions, proxies=proxies), client=("192.0.2.1", 1)) as client:
        answer = client.post("/sessions", json={}, headers={"X-Forwarded-For": said})
    assert answer.status_code == 201
    assert list(sessions._counts) == [expected]


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://testserver.evil"])
def test_pages_of_others_are_refused(client: TestClient, origin: str) -> None:
    refused = client.post("/sessions", json={}, headers={"Origin": origin})
    assert refusal(refused) == 403
    assert client.get("/healthz").json()["sessions"] == 0
    own = client.post("/sessions", json={}, headers={"Origin": "http://testserver"})
    assert own.status_code == 201


@contextmanager
def serving(folder: Path, command: list[str]) -> Iterator[str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, trust_env=False) as http:
            _wait_for(http, process)
        yield url
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()


@pytest.mark.full
def test_the_script_serves_the_given_words_and_ends_when_told_to(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_text("abbey\n", encoding="utf-8")
    with (
        serving(tmp_path, [sys.executable, str(SERVER), "--words", str(words)]) as url,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        session = http.post("/sessions", json={"seed": None}).json()["session"]
        answer = http.post(f"/sessions/{session}/guess", json={"word": "abbey"}).json()
        assert answer["reward"] == 1.0


def _wait_for(http: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            assert http.get("/healthz").status_code == 200
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("the server did not start")


def test_a_file_without_words_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--words", str(tmp_path / "none")]) == 2
    assert "hint" in capsys.readouterr().err
