import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deltachain.errors import (
    AlreadyExistsError,
    ConfigError,
    StorePermissionError,
    StoreUnavailableError,
)
from deltachain.store import FileStore
from tests.unit.store.calls import calls_of

NOBODY = 65534
"""The user that Linux and macOS keep for those who own nothing."""


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


def start(code: str, *args: str) -> subprocess.Popen[str]:
    """Run ``code`` in another process that imports what this one does."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def failing(code: int) -> Callable[..., None]:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


# Processes


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
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for turn in range(30):
        at = time.monotonic() + 0.005
        answers = []
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write(f"{at}\n")
            racer.stdin.flush()
        for racer in racers:
            assert racer.stdout is not None
            answers.append(racer.stdout.readline().strip())
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


@pytest.mark.parametrize(
    ("step", "method"),
    [
        ("write", "put"),
        ("fsync", "put"),
        ("replace", "put"),
        ("link", "put_if_absent"),
        ("unlink", "put_if_absent"),
    ],
)
def test_leftover_of_a_killed_writer_is_invisible(store: FileStore, step: str, method: str) -> None:
    store.put("a/c", b"neighbour")
    if method == "put":
        store.put("a/b", b"old")
    killed = start(KILLED, str(root(store)), step, method)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL

    assert any(Path(name).name.startswith(".tmp-") for name in files(store))
    committed = {"write": b"old", "fsync": b"old", "replace": b"old", "unlink": b"new" * 1000}
    visible = {"a/c", "a/b"} if step in committed else {"a/c"}
    assert {found.key for found in store.list()} == visible
    if step in committed:
        assert store.get("a/b") == committed[step]
        with pytest.raises(AlreadyExistsError):
            store.put_if_absent("a/b", b"next")
    else:
        store.put_if_absent("a/b", b"next")
        assert store.get("a/b") == b"next"


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


# What the operating system refuses


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
            with pytest.raises(StoreUnavailableError, match=os.strerror(code)) as caught:
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


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_refused_permission(store: FileStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store.put("a", b"data")
    monkeypatch.setattr(os, "open", failing(code))
    for call in calls_of(store):
        with pytest.raises(StorePermissionError) as caught:
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
                with pytest.raises(StorePermissionError):
                    refused("a/c", b"data")
            with pytest.raises(StorePermissionError):
                store.delete("a/b")
        (Path(folder) / "a").chmod(0o755)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_file_system_without_links_is_refused_by_name(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "link", failing(code))
    with pytest.raises(ConfigError, match="no hard links"):
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
        with pytest.raises(StoreUnavailableError):
            store.put_if_absent(key, b"data")
    assert files(store) == {"taken"}
    assert store.get("taken") == b"other"


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
