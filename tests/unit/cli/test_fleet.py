import io
import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
from rich.console import Console
from rich.live_render import LiveRender

from deltachain.cli.fleet import replica_table
from deltachain.control.comparison import compare
from deltachain.control.roster import ReplicaAnswer
from deltachain.errors import ControlPlaneError
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings
from deltachain.status import HealthLimits
from deltachain.subscribe import SubscribeConfig
from tests.support.values import eventually
from tests.unit.cli.support import invoke, ok, refused, running
from tests.unit.control.replicas import app_of, followed, leader_of, served, status
from tests.unit.replica.replicas import Followed

COUNT = 50
GONE_ALL = {f"http://r{n}:8000": ControlPlaneError("did not answer") for n in range(COUNT)}


def drawn(answers: Mapping[str, ReplicaAnswer], width: int, height: int = 3000) -> list[str]:
    out = Console(file=io.StringIO(), width=width, height=height)
    shown = LiveRender(replica_table(compare(answers, HealthLimits()), 0, width))
    with out.capture() as told:
        out.print(shown)
    return [line.rstrip() for line in told.get().splitlines()]


@pytest.mark.parametrize("width", [20, 40, 59, 60, 200])
def test_no_number_is_hidden_however_narrow_the_terminal(width: int) -> None:
    cut_off = {f"http://r{n}:8000": status(7, head=8, silence_s=999.0) for n in range(COUNT)}
    text = "".join("".join(drawn(cut_off, width)).split())
    assert text.count("cutoffversion7lag1" if width < 60 else "cutoff71") == COUNT
    assert all(url in text for url in cut_off)


@pytest.mark.parametrize("width", [30, 80, 200])
@pytest.mark.parametrize("height", [10, 24])
def test_the_summary_is_shown_however_low_the_terminal(width: int, height: int) -> None:
    lines = drawn(GONE_ALL, width, height)
    assert len(lines) <= height
    whole = drawn(GONE_ALL, width)
    assert lines[:4] == whole[:4]
    assert "50 failed" in " ".join(line.strip() for line in lines[:3])
    assert lines[-1].strip() == "..."


def test_all_are_drawn_where_there_is_room() -> None:
    lines = drawn(GONE_ALL, 80)
    assert sum("http://" in line for line in lines) == COUNT
    assert max(map(len, lines)) <= 80
    assert not any(line.strip() == "..." for line in lines)


TOKEN = "one that nobody guesses"  # noqa: S105
GONE = "http://127.0.0.1:9"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Followed]:
    yield from followed(tmp_path)


@pytest.fixture
def leader(here: Followed) -> Iterator[Leader]:
    yield from leader_of(here)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return file


def test_status_of_all_and_who_is_gone(leader: Leader, token: Path) -> None:
    with served(app_of(leader, token=TOKEN)) as url:
        told = invoke("fleet", "update", "--version", 1, "--token-file", token, url)
        assert told.code == 0
        found = invoke("fleet", "status", "--token-file", token, "--json", url, GONE)
    first, second = found.document["replicas"]
    assert (first["engine"], first["version"], first["ready"]) == (url, 1, False)
    assert "did not answer" in second["error"]
    assert "see whether it runs" in second["hint"]
    assert found.code == 7


@pytest.mark.parametrize("words", [("fleet", "status", GONE), ("agent", "x", "--engine", GONE)])
@pytest.mark.parametrize("option", ["--token", "--key", "--tok", "--token-fi"])
def test_no_secret_is_an_option(words: tuple[str, ...], option: str) -> None:
    """Whoever may list processes sees what they were started with."""
    refused(*words, option, "secret", code=2, said="No such option")


@pytest.mark.parametrize("content", [None, b"", b"\n", b"one\x01\n", b"\xff\xfe"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    refused("fleet", "status", "--token-file", file, GONE, code=2, said=(str(file), "one token"))


@pytest.mark.full
def test_the_environment_says_it_too_and_is_checked(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTACHAIN_TOKEN", TOKEN)
    with served(app_of(leader, token=TOKEN)) as url:
        assert invoke("fleet", "status", url).code == 0
    monkeypatch.setenv("DELTACHAIN_TOKNE", TOKEN)
    refused("fleet", "status", GONE, code=2, said="DELTACHAIN_TOKEN")


def test_the_table(leader: Leader, token: Path) -> None:
    leader.update()
    with served(app_of(leader, token=TOKEN)) as url:
        shown = ok("fleet", "status", "--token-file", token, url)
        denied = refused("fleet", "pause", url, code=7)
    assert "ready" in shown.stdout
    assert url in shown.stdout
    assert shown.stdout.startswith("1 replica: 1 ready; newest version held: 2\n")
    assert "401" in denied.stdout
    assert leader.status().paused is False


@pytest.mark.parametrize("place", ["option", "environment"])
def test_a_replica_whose_store_does_not_answer_is_cut_off(
    here: Followed, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    subscribe = SubscribeConfig(url=here.store.url, poll_s=0.05)
    settings = ReplicaSettings(subscribe=subscribe, spool=here.folder / "spool", follow=True)
    leader = Leader(settings, here.engine, store=here.faulty)
    leader.start()
    eventually(lambda: leader.status().version == 2)
    here.faulty.down = True
    eventually(lambda: (leader.status().silence_s or 0) > 0.5)
    options = ["--max-silence", "0.5"] if place == "option" else []
    if place == "environment":
        monkeypatch.setenv("DELTACHAIN_MAX_SILENCE_S", "0.5")
    with served(app_of(leader, is_open=True)) as url:
        (row,) = refused("fleet", "status", "--json", *options, url, code=7).document["replicas"]
    leader.stop()
    assert (row["health"], row["ready"], row["lag_versions"]) == ("cut off", True, 0)


def test_an_inventory_names_the_replicas(leader: Leader, tmp_path: Path) -> None:
    leader.update()
    file = tmp_path / "replicas.txt"
    with served(app_of(leader, is_open=True)) as url:
        file.write_text(f"# all of them\n{url}/  # the first\n{GONE}\n")
        found = invoke("fleet", "status", "--inventory", file, "--json")
    rows = found.document["replicas"]
    assert [(row["engine"], row["health"]) for row in rows] == [(url, "ready"), (GONE, "failed")]
    assert (rows[0]["lag_versions"], rows[0]["software"]) == (0, "fake/1.0")
    assert found.code == 7


def test_the_environment_names_the_replicas(
    leader: Leader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(app_of(leader, is_open=True)) as url:
        monkeypatch.setenv("DELTACHAIN_ENGINES", f"{url}, {url}/")
        assert len(invoke("fleet", "status", "--json").document["replicas"]) == 1
        file = tmp_path / "replicas.txt"
        file.write_text(f"{GONE}\n")
        monkeypatch.setenv("DELTACHAIN_ENGINES", str(file))
        found = invoke("fleet", "status", "--json").document["replicas"]
        assert [row["engine"] for row in found] == [GONE]
        assert invoke("fleet", "status", url).code == 0  # what is given counts


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status",), "no replica is given"),
        (("status", "--inventory", "x", GONE), "exclude each other"),
        (("update", "--watch", GONE), "watch `status`"),
        (("pause", "--version", "1", GONE), "version"),
        (("status", "dns://policy"), "no port"),
        (("status", "policy:8000"), "not a server address"),
    ],
)
def test_wrong_calls_say_what_to_do(words: tuple[str, ...], said: str) -> None:
    refused("fleet", *words, code=2, said=said)


@pytest.mark.full
@pytest.mark.parametrize("options", [["--json"], []])
def test_watching_goes_on_until_it_is_interrupted(leader: Leader, options: list[str]) -> None:
    leader.update()
    app, asked = app_of(leader, is_open=True), Semaphore(0)

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)
        if scope["type"] == "http":
            asked.release()

    with (
        served(counting) as url,
        running("fleet", "status", "--watch", "--every", "0.1", *options, url) as watching,
    ):
        for _ in range(3):  # two rounds are complete once there is a third
            assert asked.acquire(timeout=60)
        done = watching.end(signal.SIGINT)
    assert done.code == 130, done.stderr
    if options:
        rounds = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(rounds) >= 2
        assert {one["replicas"][0]["health"] for one in rounds} == {"ready"}
    else:
        assert "1 replica: 1 ready" in done.stdout
