"""Where the addresses of a fleet come from, and what is wrong with them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from deltachain.control.roster import (
    parse_inventory,
    read_inventory,
    resolve,
    split_entries,
)
from deltachain.errors import ConfigError, ControlPlaneError

FILE = "# eu\nhttp://a:8000\n\n  http://b:8000/  # the old one\ndns://policy.default.svc:8000\n"
LINES = ("http://a:8000", "http://b:8000/", "dns://policy.default.svc:8000")


def test_a_file_has_one_address_a_line(tmp_path: Path) -> None:
    file = tmp_path / "replicas.txt"
    file.write_text(FILE)
    assert read_inventory(file) == parse_inventory(str(file)) == LINES


def test_a_list_has_commas() -> None:
    assert parse_inventory(" http://a:8000, http://b:8000/,,") == (
        "http://a:8000",
        "http://b:8000/",
    )


@pytest.mark.parametrize(
    "content", [b"", b"# nothing\n\n", b"a:8000\n", b"http://a http://b\n", b"\xff\xfe", None]
)
def test_a_file_without_addresses_is_refused_by_name(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "replicas.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"replicas\.txt") as caught:
        read_inventory(file)
    assert "one address a line" in caught.value.hint


def test_entries_are_taken_once_and_in_order() -> None:
    found = split_entries(["http://b", "dns://x:1", "http://a/", "http://b/"])
    assert found == (["http://b", "http://a"], ["dns://x:1"])


def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(name: str, port: int, **_: Any) -> list[Any]:
        assert (name, port) == ("policy", 8000)
        return [(0, 0, 0, "", (host, port)) for host in ("10.0.0.2", "10.0.0.1", "10.0.0.2", "::1")]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    found = resolve("dns://policy:8000")
    assert found == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[::1]:8000"]


@pytest.mark.parametrize("entry", ["dns://policy", "dns://:8000", "dns://policy:http"])
def test_a_name_needs_a_port(entry: str) -> None:
    with pytest.raises(ConfigError, match="no port"):
        resolve(entry)


@pytest.mark.parametrize("name", ["no.such.name.invalid", f"{'x' * 70}.invalid"])
def test_a_name_without_addresses_is_an_error(name: str) -> None:
    with pytest.raises(ControlPlaneError, match=f"dns://{name[:20]}.* cannot be resolved"):
        resolve(f"dns://{name}:8000")
