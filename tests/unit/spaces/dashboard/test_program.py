"""``python -m spaces.dashboard``, in this process and in ones of its own."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.main import get_command

from deltachain.store import open_store
from spaces.dashboard.__main__ import NAME as MODULE
from spaces.dashboard.__main__ import app
from tests.support.values import eventually
from tests.unit.cli.support import invoke, refused, running
from tests.unit.spaces.dashboard.reports import chain_of

COMMAND = get_command(app)
TOKEN = "one that nobody guesses"  # noqa: S105


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    chain_of(12, open_store(str(tmp_path / "chain")))
    return tmp_path / "chain"


@contextmanager
def dashboard(*words: object, **environment: str) -> Iterator[str]:
    """Address of a dashboard, which is ended with Ctrl-C and then ends by itself."""
    with running(*words, "--listen", "0", module=MODULE, **environment) as process:
        url = process.error_line().split()[-1]
        httpx.get(url, timeout=60)  # it serves, so it handles Ctrl-C where a shell's job ignores it
        yield url
        done = process.end(signal.SIGINT)
    assert done.code == 130, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_a_chain_is_shown_as_it_grows(chain: Path) -> None:
    with dashboard(chain, "--poll", "0.05", "--engine", "http://127.0.0.1:1") as url:

        def overview() -> dict[str, object]:
            found: dict[str, object] = httpx.get(f"{url}/api/overview").json()
            return found

        eventually(lambda: overview()["newest"] == 11)
        eventually(lambda: "silent" in str(overview()["alerts"]))
        assert "text/html" in httpx.get(url).headers["content-type"]


@pytest.mark.full
def test_its_replicas_are_those_of_the_inventory(chain: Path) -> None:
    engines = "http://127.0.0.1:1,http://127.0.0.1:2"
    with dashboard(chain, DELTACHAIN_ENGINES=engines) as url:
        shown = httpx.get(f"{url}/api/overview").json()["replicas"]
    assert sorted(replica["engine"] for replica in shown) == engines.split(",")


@pytest.mark.full
def test_it_asks_for_the_token_of_the_replicas(chain: Path) -> None:
    with dashboard(chain, DELTACHAIN_TOKEN=TOKEN) as url:
        assert httpx.get(f"{url}/api/overview").status_code == 401
        headers = {"authorization": f"Bearer {TOKEN}"}
        assert httpx.get(f"{url}/api/overview", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--listen", "0.0.0.0:0"], "needs a token"),
        (["--listen", "nowhere"], "no address"),
        (["--engine", "ftp://x"], "not a server address"),
        (["--engine", "http://a", "--engine", "http://a/"], "twice"),
    ],
)
def test_mistakes_are_named_with_a_hint(chain: Path, words: list[str], expected: str) -> None:
    refused(chain, *words, code=2, said=(expected, "hint"), command=COMMAND)


@pytest.mark.full
def test_a_taken_port_is_named(chain: Path) -> None:
    with dashboard(chain) as url:
        done = invoke(chain, "--listen", url.rpartition(":")[2], command=COMMAND)
    assert done.code == 2
    assert "cannot be served" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.parametrize("serves", [True, False])
def test_ctrl_c_is_130_and_sigterm_is_0(
    chain: Path, number: signal.Signals, code: int, *, serves: bool
) -> None:
    with running(chain, "--listen", 0, "--poll", 0.1, module=MODULE) as process:
        said = process.error_line()
        assert "dashboard of" in said
        if serves:
            httpx.get(said.split()[-1], timeout=60)
        done = process.end(number)
    assert done.code == code, done.stderr
    assert "Traceback" not in done.stderr


def test_help_is_whole_at_80_columns_with_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = invoke("--help", command=COMMAND)
    assert done.code == 0
    assert "Usage: python -m spaces.dashboard [OPTIONS] URL" in done.stdout
    assert "Example: python -m spaces.dashboard" in done.stdout
    assert "…" not in done.stdout


def test_no_secret_of_a_mistake_is_shown(chain: Path) -> None:
    done = refused(chain, "--engine", "ftp://me:canary@host", code=2, command=COMMAND)
    assert "canary" not in done.stdout + done.stderr
