"""Clocks that are off: of the machine, of the store, and of the publisher."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from deltachain.doctor import Finding, Grade, Role
from deltachain.doctor.examine import SKEW_S, clocks, examine
from deltachain.store.file import FileStore


def examined_clock(url: object) -> list[Finding]:
    return list(examine(str(url), Role.FOLLOWER))


def clock_faults(url: object) -> list[Finding]:
    return [found for found in examined_clock(url) if found.grade is Grade.FAULT]


@pytest.mark.parametrize("ahead_s", [-7200.0, -SKEW_S - 1, SKEW_S + 1, 7200.0])
def test_a_clock_that_is_off_is_a_fault(ahead_s: float) -> None:
    found = clocks(ahead_s=ahead_s)
    assert found.grade is Grade.FAULT
    assert ("behind" in found.said) is (ahead_s > 0)
    assert clocks(ahead_s=0.0).grade is Grade.OK


def test_a_follower_finds_its_clock_behind_without_a_write(chain: Path, tmp_path: Path) -> None:
    shutil.copytree(chain, tmp_path / "copy")
    future = time.time() + 7200
    for file in (tmp_path / "copy" / "manifests").iterdir():
        os.utime(file, (future, future))
    (found,) = clock_faults(tmp_path / "copy")
    assert (found.check, "behind the store's" in found.said) == ("clock", True)


@pytest.mark.parametrize(("ahead_s", "named"), [(-7200, "ahead of the store's"), (7200, "behind")])
def test_a_follower_hears_the_clock_of_its_store(
    chain: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float, named: str
) -> None:
    monkeypatch.setattr(FileStore, "clock", lambda _: time.time() + ahead_s)
    (found,) = clock_faults(chain)
    assert (found.check, named in found.said) == ("clock", True)


def test_a_publisher_whose_clock_is_ahead_is_named(chain: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(chain, copy)
    newest = max((copy / "manifests").iterdir())
    os.utime(newest, (0, time.time() - 2 * SKEW_S - 60))
    (found,) = [one for one in examined_clock(copy) if one.check == "clock"]
    assert found.grade is Grade.NOTE
    assert "3 minutes after its write" in found.said
    assert "the clock of its publisher is ahead" in found.said
    os.utime(newest)  # as of a copy that is younger than its version
    assert not [one for one in examined_clock(copy) if one.check == "clock"]
