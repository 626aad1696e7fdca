from __future__ import annotations

from pathlib import Path

import pytest

from deltachain.store import open_store
from tests.support.seaweed import Seaweed


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = str(link.readlink()) if link.is_symlink() else ""
        inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


def test_server_is_reached_from_this_machine_alone(seaweed: Seaweed) -> None:
    found = listening(seaweed.pid)
    assert {address for address, _ in found} == {"0100007F"}
    first = seaweed.port - 6
    assert {port for _, port in found} == set(range(first, first + 8))


def test_killed_server_has_its_objects_again(seaweed: Seaweed) -> None:
    store = open_store(seaweed.url("kept"), seaweed.options)
    store.put("a", b"data")
    pid, endpoint = seaweed.pid, seaweed.endpoint
    seaweed.kill()
    assert seaweed.pid == 0
    assert not Path(f"/proc/{pid}").exists()
    seaweed.restart()
    assert seaweed.endpoint == endpoint
    assert seaweed.pid not in (0, pid)
    assert store.get("a") == b"data"
    store.close()


def test_second_server_stands_beside_the_first(seaweed: Seaweed, tmp_path: Path) -> None:
    with Seaweed(tmp_path) as second:
        assert abs(second.port - seaweed.port) >= 8
        store = open_store(second.url(), second.options)
        store.put("a", b"data")
        assert [found.key for found in store.list()] == ["a"]
        store.close()
        pid = second.pid
    assert not Path(f"/proc/{pid}").exists()
    assert list(Path("/tmp").glob(f"seaweedfs-*-{second.port}.sock")) == []  # noqa: S108
    second.stop()


def test_server_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "weed"
    program.write_text("#!/bin/sh\necho the reason; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("tests.support.seaweed._binary", lambda: str(program))
    with pytest.raises(RuntimeError, match="the reason"):
        Seaweed(tmp_path / "folder")
