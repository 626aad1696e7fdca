from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from deltachain.errors import StoreUnavailableError
from deltachain.store import FileStore
from tests.support.faults import clock_jump

DAY = 86_400
OLD = ".tmp-0123456789abcdef"
YOUNG = ".tmp-fedcba9876543210"
FOREIGN = (".tmp-mine", ".nfs0123456789abcdef", ".tmp-0123456789abcdef.swp", "tmp-0123456789abcdef")


@pytest.fixture
def littered(tmp_path: Path) -> Path:
    """A folder with an object, leftovers of two ages, and old files of somebody else."""
    littered = tmp_path / "chain"
    FileStore(littered).put("a/object", b"data")
    now = (littered / "a").stat().st_mtime
    for name in (OLD, YOUNG, *FOREIGN):
        (littered / "a" / name).write_bytes(b"left")
        age = DAY - 60 if name == YOUNG else DAY + 60
        os.utime(littered / "a" / name, (now - age, now - age))
    return littered


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("method", ["put", "put_if_absent"])
def test_old_leftovers_are_swept_by_the_first_write(littered: Path, method: str) -> None:
    getattr(FileStore(littered), method)("a/next", b"data")
    assert names(littered / "a") == {"object", "next", YOUNG, *FOREIGN}


def test_leftovers_are_swept_in_that_folder_alone_and_once(littered: Path) -> None:
    store = FileStore(littered)
    store.put("b/next", b"data")
    assert OLD in names(littered / "a")
    store.put("a/next", b"data")
    assert OLD not in names(littered / "a")
    (littered / "a" / OLD).write_bytes(b"left")
    os.utime(littered / "a" / OLD, (0, 0))
    store.put("a/next", b"data")
    assert OLD in names(littered / "a")


def test_few_folders_are_remembered_as_swept(littered: Path) -> None:
    """Every version has a folder of its own; a store that lives for months forgets the old ones."""
    store = FileStore(littered)
    store.put("a/next", b"data")
    store.put("b/next", b"data")
    for folder in ("a", "b"):
        (littered / folder / OLD).write_bytes(b"left")
        os.utime(littered / folder / OLD, (0, 0))
    for number in range(300):
        store.put(f"{number}/next", b"data")
        store.put("a/next", b"data")
    store.put("b/next", b"data")
    assert OLD in names(littered / "a")
    assert OLD not in names(littered / "b")


def test_age_is_told_by_the_clock_of_the_file_system(littered: Path) -> None:
    with clock_jump(30 * DAY):
        FileStore(littered).put("a/next", b"data")
    assert YOUNG in names(littered / "a")
    (littered / "a" / OLD).write_bytes(b"left")
    os.utime(littered / "a" / OLD, (0, 0))
    with clock_jump(-1000 * DAY):
        FileStore(littered).put("a/next", b"data")
    assert OLD not in names(littered / "a")


def test_folder_of_deleted_objects_does_not_stay_for_a_leftover(littered: Path) -> None:
    for name in (YOUNG, *FOREIGN):
        (littered / "a" / name).unlink()
    FileStore(littered).delete("a/object")
    assert not (littered / "a").exists()


def test_what_is_no_file_is_not_swept(littered: Path, tmp_path: Path) -> None:
    (littered / "a" / OLD).unlink()
    (littered / "a" / OLD).symlink_to(tmp_path)
    os.utime(littered / "a" / OLD, (0, 0), follow_symlinks=False)
    FileStore(littered).put("a/next", b"data")
    assert OLD in names(littered / "a")


def test_sweep_that_fails_fails_no_write(littered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        FileStore(littered).put("a/next", b"data")
    assert OLD in names(littered / "a")
    assert FileStore(littered).get("a/next") == b"data"


@pytest.mark.parametrize("times", [1, 2])
def test_stale_file_handle_is_opened_once_more(
    littered: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    pread, failed = os.pread, 0

    def stale(file: int, nbytes: int, start: int) -> bytes:
        nonlocal failed
        failed += 1
        if failed <= times:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return pread(file, nbytes, start)

    monkeypatch.setattr(os, "pread", stale)
    store = FileStore(littered)
    if times > 1:
        with pytest.raises(StoreUnavailableError, match=r"[Ss]tale"):
            store.get("a/object")
    assert store.get_range("a/object", 1, 2) == b"at"
    assert store.read("a/object", nbytes=4) == b"data"
