from pathlib import Path

import pytest

from tests.support.seaweed import Seaweed

pytestmark = pytest.mark.full


def listening(pid: int) -> list[tuple[str, int]]:
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
