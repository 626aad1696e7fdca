from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.hub.server import HubServer
    from tests.support.seaweed import Seaweed

# Read when huggingface_hub and hf_xet are imported. hf_xet remembers there which content a server
# has, by address: a server that began empty on the port of an older one would be sent too little.
_HOME = tempfile.mkdtemp(prefix="deltachain-test-")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ["HF_HOME"] = _HOME
os.environ["HF_XET_TELEMETRY_ENABLED"] = "0"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# Read when torch is imported. Tests run in as many processes as there are cores, and threads of
# OpenMP that wait for one another on cores that others use take a hundred times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when Triton is imported: kernels of a device run on the host in its interpreter, but where an
# engine has kernels of its own.
if not any(find_spec(engine) for engine in ("vllm", "sglang")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")

_NUMBERS = itertools.count()
_ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="each value of each parameter once, without tests marked full",
    )
    parser.addoption("--rest", action="store_true", help="the tests that --quick leaves out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left_out = quick(items)
    if config.getoption("rest"):
        kept, left_out = left_out, kept
    elif not config.getoption("quick"):
        return
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests whose environment is missing, but where it is these that are asked for."""
    for name in (name for mark in item.iter_markers("venv") for name in mark.args):
        if not (_ROOT / f".venv-{name}").exists():
            asked = "venv" in item.config.getoption("markexpr")
            (pytest.fail if asked else pytest.skip)(f".venv-{name} is missing: make venv-{name}")


def quick(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Divide tests into those of the quick tier, and the rest.

    Of a test with parameters, cases stay until each value of each parameter was met.
    """
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    met: dict[str, set[tuple[str, int]]] = {}
    for item in items:
        seen = met.setdefault(item.nodeid.partition("[")[0], set())
        case = getattr(item, "callspec", None)
        values = {(name, id(value)) for name, value in case.params.items()} if case else set()
        is_new = not values or not values <= seen
        if item.get_closest_marker("full") or not is_new:
            left_out.append(item)
        else:
            seen |= values
            kept.append(item)
    return kept, left_out


# Servers are imported by those who need one: machines with a GPU run other tests, and lack what
# they are made of.


@pytest.fixture(scope="session")
def seaweed_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    from tests.support.seaweed import Seaweed  # noqa: PLC0415

    with Seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def seaweed(seaweed_of_session: Seaweed) -> Seaweed:
    """An S3 server that runs, whatever the test before did to it."""
    if not seaweed_of_session.pid:
        seaweed_of_session.restart()
    return seaweed_of_session


@pytest.fixture
def s3_url(seaweed: Seaweed) -> Callable[[], str]:
    """Makes URLs of empty stores on that server."""
    return lambda: seaweed.url(f"test/{next(_NUMBERS)}")


@pytest.fixture(scope="session")
def hub_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    from tests.support.hub.server import HubServer  # noqa: PLC0415

    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        yield server


@pytest.fixture
def hub(hub_server: HubServer) -> HubServer:
    """An emulated Hub with everything in order, counting anew."""
    hub_server.start()  # a test may have killed it
    hub_server.reset()
    return hub_server


@pytest.fixture
def bucket(hub: HubServer) -> str:
    """A bucket that no other test has seen."""
    name = f"me/bucket-{next(_NUMBERS)}"
    hub.create_bucket(name)
    return name
