from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from deltachain.testing.hub.server import HubServer

# Read when huggingface_hub and hf_xet are imported. hf_xet remembers there which content a server
# has, by address: a server that began empty on the port of an older one would be sent too little.
_HOME = tempfile.mkdtemp(prefix="deltachain-test-")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ["HF_HOME"] = _HOME
os.environ["HF_XET_TELEMETRY_ENABLED"] = "0"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

_numbers = count()


@pytest.fixture(scope="session")
def hub_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    from deltachain.testing.hub.server import HubServer  # noqa: PLC0415 - most tests need none

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
    name = f"me/bucket-{next(_numbers)}"
    hub.create_bucket(name)
    return name
