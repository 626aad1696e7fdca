import errno
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from deltachain.errors import (
    ConfigError,
    MalformedError,
    ObjectNotFoundError,
    StoreError,
    StorePermissionError,
    StoreUnavailableError,
)
from deltachain.store import FileStore, Store, check_apart
from deltachain.testing.store import StoreContract
from tests.support.faults import clock_jump
from tests.unit.store.calls import calls_of

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


@pytest.mark.parametrize(
    ("url", "chain", "relation"),
    [
        ("s3://b/run", "s3://b/run", "is the URL of"),
        ("s3://b/run/", "S3://b//run", "is the URL of"),
        ("s3://b/run/replicas", "s3://b/run", "is inside"),
        ("s3://b", "s3://b/run", "contains"),
        ("s3:/b/run", "s3://b/run", "is the URL of"),
        ("hf://buckets/me/b/replicas", "hf://buckets/me/b/run", "is in the bucket of"),
        ("hf://buckets/Me/B", "hf://buckets/me/b/run", "is in the bucket of"),
        ("memory://one/a", "memory://one", "is inside"),
        ("file:///mnt/run/x", "/mnt/run", "is inside"),
        ("/mnt/other/../run", "file:///mnt/run", "is the URL of"),
        ("file:///mnt/a%20b", "/mnt/a b", "is the URL of"),
        ("/mnt", "/mnt/run", "contains"),
        ("gs://b/run?x=1", "gs://b/run", "is the URL of"),
    ],
)
def test_what_is_not_apart_is_refused_by_name(url: str, chain: str, relation: str) -> None:
    with pytest.raises(ConfigError, match=f"{relation} the chain") as caught:
        check_apart(url, chain)
    assert url.partition("?")[0] in str(caught.value)
    assert "beside the chain" in caught.value.hint


@pytest.mark.parametrize(
    ("url", "chain"),
    [
        ("s3://b/run-replicas", "s3://b/run"),
        ("s3://other/run", "s3://b/run"),
        ("hf://buckets/me/other", "hf://buckets/me/b/run"),
        ("/mnt/run-replicas", "/mnt/run"),
        ("memory://two", "memory://one"),
        ("s3://mnt/run", "/mnt/run"),
    ],
)
def test_what_is_apart_is_allowed(url: str, chain: str) -> None:
    check_apart(url, chain)


def test_a_link_leads_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "chain").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "chain")
    with pytest.raises(ConfigError, match="is inside"):
        check_apart(str(tmp_path / "link" / "replicas"), str(tmp_path / "chain"))


def test_relative_paths_are_those_of_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is the URL of"):
        check_apart("chain", str(tmp_path / "chain"))


class TestFileStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> FileStore:
        return FileStore(tmp_path / "chain")

    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: FileStore(tmp_path / "chain")


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "chain")


def root(store: FileStore) -> Path:
    return Path(store.url.removeprefix("file://"))


def files(store: FileStore) -> set[str]:
    """Everything on disk that is not a folder, hidden or not."""
    return {
        str(path.relative_to(root(store))) for path in root(store).rglob("*") if not path.is_dir()
    }


# Order of the steps


@pytest.mark.parametrize("method", ["put", "put_if_absent"])
def test_bytes_are_on_disk_before_the_name_and_the_name_before_the_return(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    steps: list[str] = []
    fsync, replace, link = os.fsync, os.replace, os.link

    def synced(file: int) -> None:
        status = os.fstat(file)
        is_folder = stat.S_ISDIR(status.st_mode)
        steps.append(f"sync folder {status.st_ino}" if is_folder else "sync file")
        fsync(file)

    def named(call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: str, **kwargs: int) -> None:
            steps.append("name")
            call(*args, **kwargs)

        return run

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named(replace))
    monkeypatch.setattr(os, "link", named(link))
    getattr(store, method)("a/b", b"data")

    def sync(folder: Path) -> str:
        return f"sync folder {folder.stat().st_ino}"

    made = [sync(root(store).parent), sync(root(store))]
    assert steps == [*made, "sync file", "name", sync(root(store) / "a")]


def test_folder_removed_under_a_write_is_made_again(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 3

    def remove(_nbytes: int) -> str:
        nonlocal left
        if left:
            left -= 1
            (root(store) / "a").rmdir()
        return "0"

    monkeypatch.setattr("secrets.token_hex", remove)
    store.put("a/b", b"data")
    assert left == 0
    assert store.get("a/b") == b"data"


def test_folder_that_keeps_vanishing_ends_in_an_error(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(_nbytes: int) -> str:
        (root(store) / "a").rmdir()
        return "0"

    monkeypatch.setattr("secrets.token_hex", remove)
    with pytest.raises(StoreUnavailableError, match="kept vanishing"):
        store.put("a/b", b"data")


def test_deleting_the_last_object_removes_its_folders(store: FileStore) -> None:
    store.put("a/b/c", b"data")
    store.put("a/d", b"data")
    store.delete("a/b/c")
    assert [path.name for path in (root(store) / "a").iterdir()] == ["d"]
    store.delete("a/d")
    assert list(root(store).iterdir()) == []


def test_other_users_may_read_as_the_umask_allows(store: FileStore) -> None:
    old = os.umask(0o022)
    try:
        store.put("a", b"data")
        store.put_if_absent("b", b"data")
    finally:
        os.umask(old)
    assert {stat.S_IMODE((root(store) / key).stat().st_mode) for key in "ab"} == {0o644}


def test_no_descriptor_is_leaked(store: FileStore) -> None:
    store.put("a/b/c", b"data")
    for key in ("a/b/c", "a/b", "a/b/c/d", "x/y"):
        for call in (store.get, store.find, store.delete, lambda key: store.put(key, b"")):
            try:
                call(key)
            except (StoreError, ConfigError):
                continue
    assert opened_below(root(store)) == []


def opened_below(folder: Path) -> list[Path]:
    """Files that this process has open in a folder; those elsewhere may be other tests'."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(link.readlink())
    return [path for path in found if path.is_relative_to(folder)]


# What else may lie in the folder


def test_symbolic_links_do_not_lead_out_of_the_root(store: FileStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store.put("a", b"data")
    (root(store) / "folder").symlink_to(outside)
    (root(store) / "file").symlink_to(outside / "secret")

    calls: list[Callable[[], object]] = [
        lambda: store.get("folder/secret"),
        lambda: store.get_range("folder/secret", 0, 1),
        lambda: store.find("folder/secret"),
        lambda: store.put("folder/new", b"data"),
        lambda: store.put_if_absent("folder/new", b"data"),
        lambda: store.delete("folder/secret"),
        lambda: list(store.list("folder/")),
        lambda: store.get("file"),
        lambda: store.find("file"),
    ]
    for call in calls:
        with pytest.raises(StorePermissionError) as caught:
            call()
        assert "symbolic links" in caught.value.hint
    assert [found.key for found in store.list()] == ["a"]

    store.put("file", b"data")
    assert store.get("file") == b"data"
    store.delete("folder")
    assert not (root(store) / "folder").exists()
    assert [(path.name, path.read_bytes()) for path in outside.iterdir()] == [("secret", b"secret")]


def test_root_may_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "chain").symlink_to(tmp_path / "disk")
    store = FileStore(tmp_path / "chain")
    store.put("a", b"data")
    assert (tmp_path / "disk/a").read_bytes() == b"data"
    assert [found.key for found in store.list()] == ["a"]


def test_other_things_in_the_folder_are_not_objects(store: FileStore) -> None:
    store.put("a", b"data")
    (root(store) / "lost+found").mkdir()
    (root(store) / ".nfs0001").write_bytes(b"")
    (root(store) / "ä").write_bytes(b"")
    os.mkfifo(root(store) / "fifo")
    assert [found.key for found in store.list()] == ["a"]
    assert store.find("fifo") is None
    with pytest.raises(ObjectNotFoundError):
        store.get("fifo")


@pytest.mark.parametrize("root", ["chain", "mount/chain"])
def test_root_that_was_taken_away_is_an_outage(tmp_path: Path, root: str) -> None:
    store = FileStore(tmp_path / root)
    assert (store.find("a/b"), list(store.list())) == (None, [])  # nobody has written yet
    store.put("a/b", b"x")
    reads: list[Callable[[], object]] = [
        lambda: store.find("a/b"),
        lambda: store.find("c"),
        lambda: store.get("a/b"),
        lambda: list(store.list()),
        lambda: list(store.list("a/")),
    ]
    for read in reads[:-1]:
        read()
    top = tmp_path / root.split("/", maxsplit=1)[0]
    top.rename(tmp_path / "away")
    for read in reads:
        with pytest.raises(StoreUnavailableError, match="was there, and is not any more") as caught:
            read()
        assert "mount" in caught.value.hint
    (tmp_path / "away").rename(top)
    assert store.get("a/b") == b"x"
    assert store.find("c") is None


def test_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chain").write_bytes(b"")
    for call in calls_of(FileStore(tmp_path / "chain"), "get", "find", "list", "put"):
        with pytest.raises(ConfigError, match="not a folder"):
            call()


def test_key_that_continues_another_is_refused(store: FileStore) -> None:
    store.put("a/b", b"data")
    for key in ("a/b/c", "a"):
        with pytest.raises(ConfigError, match="in the place of a folder"):
            store.put(key, b"data")
    assert files(store) == {"a/b"}


def test_object_that_is_truncated_while_it_is_read(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"data")
    monkeypatch.setattr(os, "pread", lambda *_args: b"")
    with pytest.raises(Exception, match="expected at least 4 bytes, found 0"):
        store.get("a")


def test_listing_while_objects_come_and_go(store: FileStore) -> None:
    store.put("stays/a", b"data")
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for number in range(10):
                store.put(f"goes/{number}/x", b"data")
            for number in range(10):
                store.delete(f"goes/{number}/x")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(100):
            keys = [found.key for found in store.list()]
            assert keys == sorted(keys)
            assert "stays/a" in keys
    finally:
        stop.set()
        thread.join()


def test_a_large_object_is_read_in_pieces_and_stays_as_it_was(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltachain.store.file._PIECE", 100)
    content = bytes(range(256)) * 4
    store.put("large", content)
    found = store.read("large", nbytes=len(content))
    assert bytes(found) == content
    assert memoryview(found).readonly
    with pytest.raises(MalformedError, match="large"):
        store.read("large", nbytes=len(content) - 1)
    with pytest.raises(ObjectNotFoundError, match="absent"):
        store.read("absent", nbytes=len(content))


def test_a_large_object_that_is_truncated_while_it_is_read_is_refused(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltachain.store.file._PIECE", 100)
    store.put("large", bytes(1024))
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(MalformedError, match="large"):
        store.read("large", nbytes=1024)
