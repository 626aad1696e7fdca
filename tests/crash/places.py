"""Places that crash tests keep their chains in: a folder, a real S3 server, an emulated Hub."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltachain.store import open_store

KINDS = ("file", "s3", "hf")


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process and its children get in by the environment alone."""

    kind: str
    root: str

    def url(self, name: str = "chain") -> str:
        return f"{self.root}/{name}"


def open_place(
    kind: str, folder: Path, server: Callable[[str], Any], setenv: Callable[[str, str], None]
) -> Place:
    if kind == "file":
        return Place(kind, str(folder))
    name = uuid.uuid4().hex
    if kind == "s3":
        seaweed = server("seaweed")
        for variable, value in seaweed.env().items():
            setenv(variable, value)
        return Place(kind, seaweed.url(name))
    hub = server("hub")
    for variable, value in hub.env().items():
        setenv(variable, value)
    setenv("DELTACHAIN_HF_CALLS", "1000000")  # a Hub without limits: these have their own tests
    hub.configure(calls=1_000_000, resolver_calls=1_000_000)
    hub.create_bucket(f"crash/{name}")
    return Place(kind, f"hf://buckets/crash/{name}")


def contents(url: str, prefix: str = "") -> dict[str, bytes]:
    with closing(open_store(url)) as store:
        return {info.key: store.get(info.key) for info in store.list(prefix)}


def copy_store(url: str, other: str) -> None:
    with closing(open_store(other)) as store:
        for key, data in contents(url).items():
            store.put(key, data)
