"""The game by OpenEnv's protocol: hostile messages here, and a real client of OpenEnv."""

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketTestSession
from starlette.websockets import WebSocketDisconnect

import connections
from game import PROMPT, TURNS, secret_of
from server import LARGEST, WORDS, make_app, read_words
from sessions import LIMIT, Sessions
from spaces.dashboard import app as dashboard
from tests.unit.spaces.test_server import SERVER, serving


def undocumented(module: ModuleType, name: str) -> str:
    tree = ast.parse(inspect.getsource(getattr(module, name)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            del node.body[0]
    return ast.unparse(tree)


def test_the_copy_is_the_same() -> None:
    for name in ("LimitedHttp", "limited"):
        assert undocumented(connections, name) == undocumented(dashboard, name)


ROOT: Final = Path(__file__).resolve().parents[3]
LIST: Final = read_words(WORDS)
OPENENV: Final = ROOT / ".venv-openenv" / "bin" / "python"
SEED: Final = 7

PLAYER: Final = Path(__file__).with_name("openenv_player.py")


@pytest.fixture
def sessions() -> Sessions:
    return Sessions(LIST)


@pytest.fixture
def socket(sessions: Sessions) -> Iterator[WebSocketTestSession]:
    with (
        TestClient(make_app(sessions), client=("192.0.2.1", 1)) as client,
        client.websocket_connect("/ws") as socket,
    ):
        yield socket


def ask(socket: WebSocketTestSession, kind: str, **data: Any) -> dict[str, Any]:
    socket.send_json({"type": kind, "data": data})
    found: dict[str, Any] = socket.receive_json()
    return found


def code_of(answer: dict[str, Any]) -> str:
    return str(answer["data"].get("code", "")) if answer["type"] == "error" else ""


def test_a_game_is_played(socket: WebSocketTestSession) -> None:
    begun = ask(socket, "reset", seed=SEED, episode_id="mine")
    seen = {"message": PROMPT, "turns_left": TURNS}
    data = {"observation": seen, "reward": None, "done": False}
    assert begun == {"type": "observation", "data": data}
    secret = secret_of(SEED, LIST)
    wrong = next(word for word in LIST if word != secret)
    missed = ask(socket, "step", word=wrong)["data"]
    assert (missed["reward"], missed["done"]) == (0.0, False)
    assert missed["observation"]["message"].endswith(PROMPT)
    state = ask(socket, "state")
    assert state == {"type": "state", "data": {"episode_id": "mine", "step_count": 1}}
    assert secret not in json.dumps(state)
    won = ask(socket, "step", word=secret, metadata={})["data"]
    assert (won["reward"], won["done"]) == (0.9, True)


def test_a_reset_ends_the_game_before_and_a_close_the_last(
    socket: WebSocketTestSession, sessions: Sessions
) -> None:
    for _ in range(3):
        ask(socket, "reset")
        assert len(sessions) == 1
    socket.send_json({"type": "close"})
    with pytest.raises(WebSocketDisconnect):
        socket.receive_json()
    assert len(sessions) == 0


def test_a_connection_that_is_lost_ends_its_game(sessions: Sessions) -> None:
    with TestClient(make_app(sessions)) as client:
        with client.websocket_connect("/ws") as socket:
            ask(socket, "reset")
            assert len(sessions) == 1
        assert len(sessions) == 0


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("", "INVALID_JSON"),
        ("{", "INVALID_JSON"),
        ("[" * 2000, "INVALID_JSON"),
        ("[]", "VALIDATION_ERROR"),
        ("x" * (LARGEST + 1), "VALIDATION_ERROR"),
        ("{}", "UNKNOWN_TYPE"),
        ('{"type": ["step"]}', "UNKNOWN_TYPE"),
        ('{"type": "mcp", "data": {}}', "UNKNOWN_TYPE"),
        ('{"type": "reset", "data": 1}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": "7"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": 1e400}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"word": 1}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"word": "a", "turns": 9}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"word": "crane"}}', "EXECUTION_ERROR"),
    ],
)
def test_a_message_that_is_wrong_is_refused_and_the_connection_stays(
    socket: WebSocketTestSession, raw: str, code: str
) -> None:
    socket.send_text(raw)
    assert code_of(socket.receive_json()) == code
    assert ask(socket, "reset")["type"] == "observation"


def test_bytes_are_refused(socket: WebSocketTestSession) -> None:
    socket.send_bytes(b"\xff\x00")
    assert code_of(socket.receive_json()) == "INVALID_JSON"


def test_a_game_that_is_over_takes_no_guess(socket: WebSocketTestSession) -> None:
    ask(socket, "reset", seed=SEED)
    ask(socket, "step", word=secret_of(SEED, LIST))
    assert code_of(ask(socket, "step", word="crane")) == "EXECUTION_ERROR"


def test_the_limit_of_a_client_counts_here_too(
    socket: WebSocketTestSession, sessions: Sessions
) -> None:
    for _ in range(LIMIT):
        sessions.open(None, "192.0.2.1/32")
    assert code_of(ask(socket, "reset")) == "CAPACITY_REACHED"


def test_pages_of_others_are_not_let_in(sessions: Sessions) -> None:
    with (
        TestClient(make_app(sessions)) as client,
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/ws", headers={"Origin": "https://evil.example"}),
    ):
        pytest.fail("it was accepted")


def test_it_says_what_it_is(sessions: Sessions) -> None:
    with TestClient(make_app(sessions)) as client:
        assert client.get("/health").json() == {"status": "healthy"}
        assert client.get("/metadata").json()["name"] == "words"
        schema = client.get("/schema").json()
    assert schema.keys() == {"action", "observation", "state"}
    assert schema["action"]["required"] == ["word"]


@pytest.mark.full
@pytest.mark.venv("openenv")
def test_a_client_of_openenv_plays_a_game(tmp_path: Path) -> None:
    secret = secret_of(SEED, LIST)
    wrong = next(word for word in LIST if word != secret)
    with serving(tmp_path, [sys.executable, str(SERVER)]) as url:
        done = subprocess.run(
            [OPENENV, PLAYER, url, secret, wrong],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        )
    assert done.returncode == 0, done.stderr
    begun, missed, state, won, refused, again = map(json.loads, done.stdout.splitlines())
    assert begun["observation"] == {"message": PROMPT, "turns_left": TURNS}
    assert (begun["reward"], begun["done"]) == (None, False)
    assert (missed["reward"], missed["done"]) == (0.0, False)
    assert state == {"episode_id": "mine", "step_count": 1}
    assert (won["reward"], won["done"]) == (0.9, True)
    assert "this game is done" in refused
    assert again["observation"]["turns_left"] == TURNS


def test_a_player_who_says_nothing_loses_the_connection() -> None:
    sessions = Sessions(LIST, idle_s=0.2)
    with (
        TestClient(make_app(sessions), client=("192.0.2.1", 1)) as client,
        client.websocket_connect("/ws") as socket,
    ):
        ask(socket, "reset", seed=SEED)
        with pytest.raises(WebSocketDisconnect):
            socket.receive_json()
    assert len(sessions) == 0
