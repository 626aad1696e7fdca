import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from deltachain import errors
from deltachain.store import FileStore, Store, check_apart
from deltachain.testing.store import StoreContract
from tests.support.faults import clock_jump
from tests.unit.store.calls import calls_of

NOBODY = 65534
"""The user that Linux and macOS keep for those who own nothing."""


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


def failing(code: int) -> Callable[..., None]:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


# Leftovers of writers that were killed

DAY = 86_400
OLD = ".tmp-0123456789abcdef"
YOUNG = ".tmp-fedcba9876543210"
FOREIGN = (".tmp-mine", ".nfs0123456789abcdef", ".tmp-0123456789abcdef.swp", "tmp-0123456789abcdef")


def leave(path: Path, at: float = 0.0) -> None:
    """Leave a file that was written to last at some time."""
    path.write_bytes(b"left")
    os.utime(path, (at, at))


@pytest.fixture
def littered(tmp_path: Path) -> Path:
    """A folder with an object, leftovers of two ages, and old files of somebody else."""
    littered = tmp_path / "chain"
    for key in ("a/object", "a/other"):
        FileStore(littered).put(key, b"data")
    now = (littered / "a").stat().st_mtime
    for name in (OLD, YOUNG, *FOREIGN):
        leave(littered / "a" / name, now - DAY + (60 if name == YOUNG else -60))
    return littered


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_old_leftovers_are_swept_by_a_delete_in_their_folder(littered: Path) -> None:
    FileStore(littered).put("b/object", b"data")
    FileStore(littered).delete("b/object")
    assert OLD in names(littered / "a")
    FileStore(littered).delete("a/other")
    assert names(littered / "a") == {"object", YOUNG, *FOREIGN}


def test_age_is_told_by_the_clock_of_the_file_system(littered: Path) -> None:
    with clock_jump(30 * DAY):
        FileStore(littered).delete("a/other")
    assert YOUNG in names(littered / "a")
    leave(littered / "a" / OLD)
    FileStore(littered).put("a/other", b"data")
    with clock_jump(-1000 * DAY):
        FileStore(littered).delete("a/other")
    assert OLD not in names(littered / "a")


def test_folder_of_deleted_objects_does_not_stay_for_a_leftover(littered: Path) -> None:
    for name in (YOUNG, *FOREIGN):
        (littered / "a" / name).unlink()
    for key in ("a/object", "a/other"):
        FileStore(littered).delete(key)
    assert not (littered / "a").exists()


def test_what_is_no_file_is_not_swept(littered: Path, tmp_path: Path) -> None:
    (littered / "a" / OLD).unlink()
    (littered / "a" / OLD).symlink_to(tmp_path)
    os.utime(littered / "a" / OLD, (0, 0), follow_symlinks=False)
    FileStore(littered).delete("a/other")
    assert OLD in names(littered / "a")


def test_sweep_that_fails_fails_no_delete(littered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", failing(errno.EACCES))
        FileStore(littered).delete("a/other")
    assert {OLD, "object"} < names(littered / "a")


@pytest.mark.parametrize(
    ("step", "method", "committed"),
    [
        ("write", "put", b"old"),
        ("fsync", "put", b"old"),
        ("replace", "put", b"old"),
        ("link", "put_if_absent", None),
        ("unlink", "put_if_absent", b"new" * 1000),
    ],
)
def test_leftover_of_a_killed_writer_is_invisible(
    store: FileStore, step: str, method: str, committed: bytes | None
) -> None:
    store.put("a/c", b"neighbour")
    if method == "put":
        store.put("a/b", b"old")
    killed = start(KILLED, str(root(store)), step, method)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert any(Path(name).name.startswith(".tmp-") for name in files(store))
    visible = {found.key for found in store.list()}
    if committed is None:
        assert visible == {"a/c"}
        store.put_if_absent("a/b", b"next")
        assert store.get("a/b") == b"next"
    else:
        assert visible == {"a/c", "a/b"}
        assert store.get("a/b") == committed
        with pytest.raises(errors.AlreadyExistsError):
            store.put_if_absent("a/b", b"next")


KILLED = """
import os, signal, sys
from deltachain.store import FileStore

step = sys.argv[2]
if step == "write":
    write = os.write
    os.write = lambda file, data: (write(file, data[:100]), os.kill(os.getpid(), signal.SIGKILL))
else:
    setattr(os, step, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
getattr(FileStore(sys.argv[1]), sys.argv[3])("a/b", b"new" * 1000)
"""


def start(code: str, *args: str) -> subprocess.Popen[str]:
    """Run ``code`` in another process that imports what this one does."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


# Other processes

RACER = """
import sys, time
from deltachain.errors import AlreadyExistsError
from deltachain.store import FileStore

store, me = FileStore(sys.argv[1]), sys.argv[2].encode()
print("ready")
for turn, line in enumerate(sys.stdin):
    while time.monotonic() < float(line):
        pass
    try:
        store.put_if_absent(f"manifests/{turn}", me * 5000)
        print("won")
    except AlreadyExistsError:
        print("lost")
"""


def test_one_of_two_racing_processes_wins(store: FileStore) -> None:
    racers = [start(RACER, str(root(store)), name) for name in "ab"]
    pipes = [(racer.stdin, racer.stdout) for racer in racers]
    for _, output in pipes:
        assert output is not None
        assert output.readline() == "ready\n"
    for turn in range(30):
        at = time.monotonic() + 0.005
        answers = []
        for given, _ in pipes:
            assert given is not None
            given.write(f"{at}\n")
            given.flush()
        for _, output in pipes:
            assert output is not None
            answers.append(output.readline().strip())
        assert sorted(answers) == ["lost", "won"]
        assert store.get(f"manifests/{turn}") == b"ab"[answers.index("won") :][:1] * 5000
    for racer in racers:
        racer.communicate()
        assert racer.returncode == 0
    assert files(store) == {f"manifests/{turn}" for turn in range(30)}


WRITER = """
import sys
from deltachain.store import FileStore

store = FileStore(sys.argv[1])
store.put("big", b"x" * 4_000_000)
print("ready")
for turn in range(1_000_000):
    store.put("big", bytes([turn % 256]) * 4_000_000)
    store.put_if_absent(f"many/{sys.argv[2]}-{turn}", bytes([turn % 256]) * 1_000_000)
"""


@pytest.mark.full
def test_writer_killed_at_any_time_leaves_whole_objects(store: FileStore) -> None:
    for turn in range(8):
        writer = start(WRITER, str(root(store)), str(turn))
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(turn * 0.008)
        writer.kill()
        writer.communicate()
        assert writer.returncode == -signal.SIGKILL
    for found in store.list():
        data = store.get(found.key)
        assert len(data) == found.nbytes == (4_000_000 if found.key == "big" else 1_000_000)
        assert data == data[:1] * len(data)


LIMITED = """
import resource, sys
from deltachain.errors import StoreUnavailableError
from deltachain.store import FileStore

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
store = FileStore(sys.argv[1])
for method in (store.put, store.put_if_absent):
    try:
        method("a", bytes(1_000_000))
    except StoreUnavailableError as error:
        print(error.hint)
"""


def test_object_beyond_the_file_size_limit_leaves_the_old_one(store: FileStore) -> None:
    store.put("a", b"old")
    output, _ = start(LIMITED, str(root(store))).communicate()
    assert output.count("ulimit") == 2
    assert store.get("a") == b"old"
    assert files(store) == {"a"}


# What the operating system does and refuses


@pytest.mark.parametrize("method", ["put", "put_if_absent"])
def test_bytes_are_on_disk_before_the_name_and_the_name_before_the_return(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    steps: list[str] = []
    fsync = os.fsync

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
    monkeypatch.setattr(os, "replace", named(os.replace))
    monkeypatch.setattr(os, "link", named(os.link))
    getattr(store, method)("a/b", b"data")

    def sync(folder: Path) -> str:
        return f"sync folder {folder.stat().st_ino}"

    made = [sync(root(store).parent), sync(root(store))]
    assert steps == [*made, "sync file", "name", sync(root(store) / "a")]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_folder_that_can_not_be_synced_is_tolerated(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fsync = os.fsync

    def only_files(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(file)

    monkeypatch.setattr(os, "fsync", only_files)
    store.put("a/b", b"data")
    assert store.get("a/b") == b"data"


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize(
    ("code", "hint"),
    [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "quota"), (errno.EIO, "system log")],
)
def test_full_or_failing_disk_leaves_the_old_object(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, call: str, code: int, hint: str
) -> None:
    store.put("a", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code))
        for method, key in ((store.put, "a"), (store.put_if_absent, "b")):
            with pytest.raises(errors.StoreUnavailableError, match=os.strerror(code)) as caught:
                method(key, b"new")
            assert hint in caught.value.hint
            assert caught.value.retryable
            assert (caught.value.key, caught.value.url) == (key, store.url)
            assert isinstance(caught.value.__cause__, OSError)
    assert store.get("a") == b"old"
    assert files(store) == {"a"}


def test_disk_that_takes_few_bytes_at_a_time(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, pread = os.write, os.pread
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    monkeypatch.setattr(os, "pread", lambda file, length, at: pread(file, min(length, 11), at))
    store.put("a", b"0123456789" * 10)
    assert store.get("a") == b"0123456789" * 10
    assert store.get_range("a", 5, 50) == b"5678901234" * 5


@pytest.mark.parametrize("times", [1, 2])
def test_stale_file_handle_is_opened_once_more(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    pread, failed = os.pread, 0

    def stale(file: int, nbytes: int, start: int) -> bytes:
        nonlocal failed
        failed += 1
        if failed <= times:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return pread(file, nbytes, start)

    store.put("a", b"data")
    monkeypatch.setattr(os, "pread", stale)
    if times > 1:
        with pytest.raises(errors.StoreUnavailableError, match=r"[Ss]tale"):
            store.get("a")
    assert store.get_range("a", 1, 2) == b"at"
    assert store.read("a", nbytes=4) == b"data"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_refused_permission(store: FileStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store.put("a", b"data")
    monkeypatch.setattr(os, "open", failing(code))
    for call in calls_of(store):
        with pytest.raises(errors.StorePermissionError) as caught:
            call()
        assert isinstance(caught.value, PermissionError)
        assert "permissions" in caught.value.hint


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Be somebody to whom permissions apply; root may write everywhere."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


def test_read_only_folder_can_be_followed_but_not_written() -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is closed to all but its owner
        Path(folder).chmod(0o755)
        store = FileStore(folder)
        store.put("a/b", b"data")
        (Path(folder) / "a").chmod(0o555)
        with ordinary_user():
            assert store.get("a/b") == b"data"
            for refused in (store.put, store.put_if_absent):
                with pytest.raises(errors.StorePermissionError):
                    refused("a/c", b"data")
            with pytest.raises(errors.StorePermissionError):
                store.delete("a/b")
        (Path(folder) / "a").chmod(0o755)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_file_system_without_links_is_refused_by_name(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "link", failing(code))
    with pytest.raises(errors.ConfigError, match="no hard links"):
        store.put_if_absent("a", b"data")
    assert files(store) == set()


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT])
def test_lost_reply_to_a_link_is_a_success(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    link = os.link

    def lose(*args: str, src_dir_fd: int, dst_dir_fd: int) -> None:
        link(*args, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", lose)
    store.put_if_absent("a", b"data")
    assert store.get("a") == b"data"
    assert files(store) == {"a"}


def test_link_that_failed_is_not_a_success(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("taken", b"other")
    monkeypatch.setattr(os, "link", failing(errno.EIO))
    for key in ("a", "taken"):
        with pytest.raises(errors.StoreUnavailableError):
            store.put_if_absent(key, b"data")
    assert files(store) == {"taken"}
    assert store.get("taken") == b"other"


@pytest.mark.parametrize("times", [3, 1_000_000])
def test_folder_removed_under_a_write_is_made_again_a_few_times(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    left = times

    def remove(_nbytes: int) -> str:
        nonlocal left
        if left:
            left -= 1
            (root(store) / "a").rmdir()
        return "0"

    monkeypatch.setattr("secrets.token_hex", remove)
    if times > 3:
        with pytest.raises(errors.StoreUnavailableError, match="kept vanishing"):
            store.put("a/b", b"data")
    else:
        store.put("a/b", b"data")
        assert left == 0
        assert store.get("a/b") == b"data"


def test_object_that_is_truncated_while_it_is_read_is_refused(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltachain.store.file._PIECE", 100)
    store.put("a", b"data")
    store.put("large", bytes(1024))
    monkeypatch.setattr(os, "pread", lambda *_args: b"")
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(Exception, match="expected at least 4 bytes, found 0"):
        store.get("a")
    with pytest.raises(errors.MalformedError, match="large"):
        store.read("large", nbytes=1024)


def test_a_large_object_is_read_in_pieces_and_stays_as_it_was(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltachain.store.file._PIECE", 100)
    content = bytes(range(256)) * 4
    store.put("large", content)
    found = store.read("large", nbytes=len(content))
    assert bytes(found) == content
    assert memoryview(found).readonly
    with pytest.raises(errors.MalformedError, match="large"):
        store.read("large", nbytes=len(content) - 1)
    with pytest.raises(errors.ObjectNotFoundError, match="absent"):
        store.read("absent", nbytes=len(content))


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
            with suppress(errors.StoreError, errors.ConfigError):
                call(key)
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            opened.append(link.readlink())
    assert not [path for path in opened if path.is_relative_to(root(store))]


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
        with pytest.raises(errors.StorePermissionError) as caught:
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
    with pytest.raises(errors.ObjectNotFoundError):
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
        with pytest.raises(
            errors.StoreUnavailableError, match="was there, and is not any more"
        ) as caught:
            read()
        assert "mount" in caught.value.hint
    (tmp_path / "away").rename(top)
    assert store.get("a/b") == b"x"
    assert store.find("c") is None


def test_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"{}")
    calls = calls_of(FileStore(tmp_path / "file"), "get", "find", "list", "put")
    for call in (*calls, *calls_of(FileStore(tmp_path / "file" / "run"), "put")):
        with pytest.raises(errors.ConfigError, match="not a folder") as caught:
            call()
        assert "name" in caught.value.hint


def test_key_that_continues_another_is_refused(store: FileStore) -> None:
    store.put("a/b", b"data")
    for key in ("a/b/c", "a"):
        with pytest.raises(errors.ConfigError, match="in the place of a folder"):
            store.put(key, b"data")
    assert files(store) == {"a/b"}


# Two stores that must be apart


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
    with pytest.raises(errors.ConfigError, match=f"{relation} the chain") as caught:
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


def test_links_lead_where_they_lead_and_relative_paths_are_those_of_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chain").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "chain")
    with pytest.raises(errors.ConfigError, match="is the URL of"):
        check_apart("chain", str(tmp_path / "chain"))
    with pytest.raises(errors.ConfigError, match="is inside"):
        check_apart(str(tmp_path / "link" / "replicas"), str(tmp_path / "chain"))
