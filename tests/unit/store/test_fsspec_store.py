import asyncio
import errno
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from deltachain import errors
from deltachain.store import MemoryStore, Store, fsspec_store, open_store
from deltachain.store.fsspec_store import (
    PROMISES,
    UNKNOWN,
    WRAPPERS,
    FsspecStore,
    Promises,
    modified,
    open_fsspec,
)
from deltachain.testing.store import StoreContract, pattern
from tests.unit.store.calls import calls_of
from tests.unit.store.stub import Answer, Stub

pytest.importorskip("fsspec")
from fsspec.asyn import get_loop
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry as REGISTRY  # noqa: N812

CREATES = Promises(writes="put", create={"mode": "create"}, list_consistent=True)
Open = Callable[..., FsspecStore]


class OwnFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A memory of its own: by default all share one."""

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]


class ObjectFileSystem(OwnFileSystem):
    """An object store: of racing creates one succeeds. Remembers its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.calls: list[str] = []

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.calls.append(f"pipe_file {mode} {type(value).__name__}")
        with self.lock:
            super().pipe_file(path, value, mode=mode, **kwargs)

    def cat_ranges(self, paths: list[str], *args: Any, **kwargs: Any) -> list[bytes]:
        self.calls.append(f"cat_ranges {len(paths)}")
        found: list[bytes] = super().cat_ranges(paths, *args, **kwargs)
        return found


def fresh(kind: type[Any]) -> Any:
    return kind(skip_instance_cache=True)


@pytest.fixture
def objects() -> ObjectFileSystem:
    return fresh(ObjectFileSystem)  # type: ignore[no-any-return]


# Errors


class HttpError(Exception):
    """What gcsfs raises: no OSError."""

    def __init__(self, code: object) -> None:
        super().__init__("said by the library")
        self.code = code


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError(errno.EACCES, "no"), errors.StorePermissionError),
        (OSError("Forbidden: bucket/x"), errors.StorePermissionError),
        (HttpError(403), errors.StorePermissionError),
        (HttpError("401"), errors.StorePermissionError),
        (HttpError(503), errors.StoreUnavailableError),
        (TimeoutError(), errors.StoreUnavailableError),
        (ConnectionResetError(errno.ECONNRESET, "reset"), errors.StoreUnavailableError),
        (OSError("https://user:secret@host/x?sig=secret failed"), errors.StoreUnavailableError),
        (RecursionError("said by the library"), errors.StoreUnavailableError),  # nobody foresaw it
    ],
)
def test_errors_say_what_to_do(
    objects: ObjectFileSystem,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    expected: type[Exception],
) -> None:
    module = type(sys)("gcsfs.retry")
    module.HttpError = HttpError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gcsfs.retry", module)
    store = FsspecStore(objects, "bucket", promises=CREATES)
    store.put("a", b"data")

    def fail(*_args: object, **_kwargs: object) -> None:
        raise error

    for method in ("info", "cat_file", "pipe_file", "rm_file", "find"):
        setattr(objects, method, fail)
    calls: list[Callable[[], object]] = [*calls_of(store), lambda: store.put_if_absent("b", b"")]
    for call in calls:
        with pytest.raises(expected) as caught:
            call()
        assert caught.value.__cause__ is error
        assert "secret" not in str(caught.value)
        if isinstance(error, RecursionError):
            assert "unexpected RecursionError" in str(caught.value)


def test_bucket_that_is_not_there(objects: ObjectFileSystem) -> None:
    store = FsspecStore(objects, "bucket", promises=CREATES)

    def fail(*_args: object, **_kwargs: object) -> None:
        raise FileNotFoundError("bucket")

    for method in ("pipe_file", "find"):
        setattr(objects, method, fail)
    for write in (store.put, store.put_if_absent):
        with pytest.raises(errors.StoreUnavailableError, match="no place for it") as caught:
            write("a", b"data")
        assert "bucket" in caught.value.hint
    assert list(store.list()) == []


# URLs


def test_url_opens_the_file_system_with_its_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}

    class Elsewhere(LocalFileSystem):  # type: ignore[misc]
        protocol = "sftp"

        def __init__(self, **options: Any) -> None:
            seen.update(options)
            super().__init__()

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(LocalFileSystem._strip_protocol(path.removeprefix("sftp://me:secret@host")))

        @staticmethod
        def _get_kwargs_from_urls(_url: str) -> dict[str, Any]:
            return {"host": "host"}

    monkeypatch.setitem(REGISTRY, "sftp", Elsewhere)
    store = open_store(f"sftp://me:secret@host{tmp_path}/chain", {"port": 22})
    assert isinstance(store, FsspecStore)
    assert seen == {"host": "host", "port": 22}
    assert store.url == f"sftp://me@host{tmp_path}/chain"
    store.put("a", b"data")
    assert (tmp_path / "chain/a").read_bytes() == b"data"
    monkeypatch.setattr(Elsewhere, "__init__", lambda _self: None)
    with pytest.raises(errors.ConfigError, match="port") as caught:
        open_store("sftp://me:secret@host/x", {"port": 22})
    assert "secret" not in str(caught.value)


def test_memory_url_of_fsspec_is_not_ours() -> None:
    assert isinstance(open_fsspec("memory://test-fs/chain"), FsspecStore)
    assert isinstance(open_store("memory://test-fs/chain"), MemoryStore)
    assert open_fsspec("memory://test-fs/chain").url == "memory://test-fs/chain"


@pytest.mark.parametrize(
    ("scheme", "package", "message", "hint"),
    [
        ("gs", "gcsfs", "not installed", "pip install 'deltachain[gcs]'"),
        ("az", "adlfs", "not installed", "pip install 'deltachain[azure]'"),
        ("abfs", "adlfs", "not installed", "pip install 'deltachain[azure]'"),
        ("box", "boxfs", "not installed", "boxfs"),  # a protocol without a line
        ("gs", "fsspec", "gs://", "deltachain[gcs]"),
        ("az", "fsspec", "az://", "deltachain[azure]"),
        ("sftp", "fsspec", "sftp://", "deltachain[fsspec]"),
    ],
)
def test_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, scheme: str, package: str, message: str, hint: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    monkeypatch.delitem(REGISTRY, scheme, raising=False)
    with pytest.raises(errors.ConfigError, match=message) as caught:
        open_store(f"{scheme}://bucket/prefix")
    assert hint in caught.value.hint


def test_unknown_scheme_is_answered_with_what_there_is() -> None:
    with pytest.raises(errors.ConfigError, match="nonsense://") as caught:
        open_store("nonsense://user:secret@host/x")
    assert all(name in caught.value.hint for name in ("file", "memory", "s3", "hf", "gs", "az"))
    assert "simplecache" not in caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "az://bucket/x?sig=secret",
        "az://bucket/x#secret",
        "az:/secret/x",
        "az://[secret",
        "simplecache://secret",
        "az://secret::gs://secret",
        "sftp+x://secret",
    ],
)
def test_wrong_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)
    assert url.partition(":")[0] in str(caught.value)


def test_url_without_a_place_is_refused() -> None:
    for url in ("memory://", "memory:///"):
        with pytest.raises(errors.ConfigError, match="bucket"):
            open_fsspec(url)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "127.0.0.1:9"])
def test_a_web_server_that_does_not_answer_has_no_absent_objects(host: str) -> None:
    pytest.importorskip("aiohttp")
    store = open_store(f"http://{host}/chain")
    for look in calls_of(store, "find", "get", "get_range"):
        with pytest.raises(errors.StoreUnavailableError) as caught:
            look()
    assert ("check the host in the URL" in caught.value.hint) == ("invalid" in host)


@pytest.mark.parametrize(
    ("status", "is_absent"), [(404, True), (403, True), (503, False), (429, False)]
)
def test_what_a_web_server_answers_tells_absence_from_trouble(status: int, is_absent: bool) -> None:
    pytest.importorskip("aiohttp")
    with Stub(Answer(status)) as stub:
        store = open_store(f"{stub.options['endpoint_url']}/chain")
        if is_absent:
            assert store.find("a") is None
        else:
            with pytest.raises(errors.StoreUnavailableError):
                store.find("a")


class TestObjects(StoreContract):
    @pytest.fixture
    def store(self, objects: ObjectFileSystem) -> FsspecStore:
        return FsspecStore(objects, "bucket/chain", promises=CREATES)

    @pytest.fixture
    def reopen(self, objects: ObjectFileSystem) -> Callable[[], Store]:
        return lambda: FsspecStore(objects, "bucket/chain", promises=CREATES)


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> FsspecStore:
        return FsspecStore(fresh(OwnFileSystem), "/chain")

    @pytest.fixture
    def reopen(self, store: FsspecStore) -> Callable[[], Store]:
        return lambda: FsspecStore(store._fs, "/chain")


class TestLocal(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> FsspecStore:
        return FsspecStore(fresh(LocalFileSystem), str(tmp_path / "chain"))

    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: FsspecStore(fresh(LocalFileSystem), str(tmp_path / "chain"))


class SwapFileSystem(LocalFileSystem):  # type: ignore[misc]
    """Refuses to rename onto a name that is taken, as Windows shares do."""

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.exists(path2):
            raise FileExistsError(path2)
        super().mv(path1, path2, **kwargs)


@pytest.fixture
def open_local(tmp_path: Path) -> Open:
    def build(kind: type[Any] = LocalFileSystem, **settings: Any) -> FsspecStore:
        return FsspecStore(fresh(kind), str(tmp_path / "chain"), **settings)

    return build


def files(tmp_path: Path) -> list[str]:
    root = tmp_path / "chain"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


# What is claimed


@pytest.mark.parametrize("filesystem", [MemoryFileSystem, LocalFileSystem])
def test_exclusive_create_that_looks_first_is_not_claimed(filesystem: type[Any]) -> None:
    store = FsspecStore(fresh(filesystem), "/nowhere/at-all")
    assert not store.capabilities.conditional_put
    assert store.capabilities.list_consistent


def test_exclusive_create_is_claimed_only_where_the_storage_decides() -> None:
    claiming = {name for name, promises in PROMISES.items() if promises.create is not None}
    assert claiming == {"gs", "gcs", "az", "abfs", "abfss"}
    assert all(PROMISES[name].writes == "put" for name in claiming)
    assert not WRAPPERS & PROMISES.keys()


def test_unknown_protocol_promises_nothing_and_is_not_written(open_local: Open) -> None:
    store = open_local(promises=UNKNOWN)
    open_local().put("a", b"data")
    assert not store.capabilities.conditional_put
    assert not store.capabilities.list_consistent
    assert store.get("a") == b"data"
    for write in (store.put, store.put_if_absent):
        with pytest.raises(errors.ConfigError, match="how to write an object whole") as caught:
            write("b", b"data")
        assert "gs" in caught.value.hint
    assert [found.key for found in store.list()] == ["a"]


def test_file_system_without_a_line_is_of_an_unknown_protocol(objects: ObjectFileSystem) -> None:
    objects.protocol = ("strange", "stranger")
    with pytest.raises(errors.ConfigError, match="how to write"):
        FsspecStore(objects, "bucket").put("a", b"")
    objects.protocol = ("strange", "memory")
    FsspecStore(objects, "bucket").put("a", b"")


def test_exclusive_create_is_asked_of_the_file_system(objects: ObjectFileSystem) -> None:
    store = FsspecStore(objects, "bucket", promises=CREATES)
    store.put_if_absent("a", bytearray(b"data"))
    assert objects.calls == ["pipe_file create bytes"]
    before = store.requests
    with pytest.raises(errors.AlreadyExistsError):
        store.put_if_absent("a", memoryview(b"other"))
    assert store.requests == before + 1


@pytest.mark.parametrize("zonal", [False, True])
def test_zonal_buckets_overwrite_and_are_refused(objects: ObjectFileSystem, *, zonal: bool) -> None:
    async def is_zonal(bucket: str) -> bool:
        await asyncio.sleep(0)
        return zonal and bucket == "bucket"

    objects.loop, objects._is_zonal_bucket = get_loop(), is_zonal
    store = FsspecStore(objects, "bucket/chain", promises=CREATES)
    store._root = store._root.lstrip("/")  # as gcsfs gives it
    for write in (store.put_if_absent, store.put):
        if zonal:
            with pytest.raises(errors.ConfigError, match="zonal"):
                write("a", b"data")
        else:
            write("a", b"data")
    assert bool(objects.calls) is not zonal


def test_what_the_file_system_lists_is_not_cached(objects: ObjectFileSystem) -> None:
    dropped: list[str] = []
    objects.invalidate_cache = lambda path=None: dropped.append(str(path))
    store = FsspecStore(objects, "bucket", promises=CREATES)
    assert not objects.dircache.use_listings_cache
    list(store.list())
    store.find("a")
    assert len(dropped) == 2


# Reads


def test_large_object_is_read_in_pieces_where_it_is_far(
    objects: ObjectFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_store, "_PIECE", 1000)
    store = FsspecStore(objects, "bucket")
    data = pattern(11_001)
    store.put("a", data)
    assert store.read("a", nbytes=len(data)) == data
    assert [call for call in objects.calls if call.startswith("cat")] == [
        "cat_ranges 8",
        "cat_ranges 4",
    ]


class CutFileSystem(ObjectFileSystem):
    """Everything that it sends ends one byte too early."""

    def cat_file(self, *args: Any, **kwargs: Any) -> bytes:
        data: bytes = super().cat_file(*args, **kwargs)
        return data[:-1]


@pytest.mark.parametrize("nbytes", [10, 17 << 20])
def test_body_that_ends_early_is_not_an_object(nbytes: int) -> None:
    store = FsspecStore(fresh(CutFileSystem), "bucket", promises=CREATES)
    store.put("a", bytes(nbytes))
    with pytest.raises(errors.MalformedError, match="expected"):
        store.read("a", nbytes=nbytes)
    with pytest.raises(errors.MalformedError, match="expected at least 5 bytes, found 4"):
        store.get_range("a", 0, 5)


def test_object_that_grew_beyond_the_limit_while_it_was_read(objects: ObjectFileSystem) -> None:
    store = FsspecStore(objects, "bucket", promises=CREATES)
    store.put("a", b"12345")
    objects.info = lambda path: {"name": path, "size": 1, "type": "file"}
    with pytest.raises(errors.MalformedError, match="at most 3"):
        store.get("a", limit=3)


def test_object_of_untold_size_is_not_read(objects: ObjectFileSystem) -> None:
    store = FsspecStore(objects, "bucket", promises=CREATES)
    store.put("a", b"12345")
    objects.info = lambda path: {"name": path, "size": None, "type": "file"}
    with pytest.raises(errors.StoreUnavailableError, match="how large"):
        store.get("a")


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"mtime": 1.5e9, "created": 9.0}, 1.5e9),
        ({"last_modified": datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC)}, 1e9),
        ({"updated": "2001-09-09T01:46:40.000Z"}, 1e9),
        ({"modified": datetime(2001, 9, 9, 1, 46, 40)}, 1e9),  # noqa: DTZ001
        ({"updated": "yesterday"}, None),
        ({"mtime": None}, None),
        ({}, None),
    ],
)
def test_time_is_told_in_many_ways(info: dict[str, Any], expected: float | None) -> None:
    assert modified(info) == expected


def test_what_is_no_object_is_not_listed(open_local: Open, tmp_path: Path) -> None:
    store = open_local()
    store.put("a/b", b"data")
    (tmp_path / "chain" / ".hidden").write_bytes(b"")
    (tmp_path / "chain" / "a" / ".tmp-0123").write_bytes(b"")
    (tmp_path / "chain" / "empty").mkdir()
    assert [found.key for found in store.list()] == ["a/b"]


def test_folder_that_can_not_be_listed_is_not_left_out(
    open_local: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_local()
    store.put("a/b", b"data")

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "refused")

    monkeypatch.setattr(LocalFileSystem, "ls", refuse)
    with pytest.raises(errors.StorePermissionError):
        list(store.list())


# Writes


def test_write_goes_beside_and_is_renamed(
    open_local: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_local()
    store.put("a/b", b"old")

    def fail(*_args: object, **_kwargs: object) -> None:
        assert len(files(tmp_path)) == 2
        assert store.get("a/b") == b"old"
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(LocalFileSystem, "mv", fail)
    with pytest.raises(errors.StoreUnavailableError, match="no space left"):
        store.put("a/b", b"new")
    assert files(tmp_path) == ["a/b"]
    assert store.get("a/b") == b"old"


def test_rename_that_replaces_nothing_is_preceded_by_a_removal(
    open_local: Open, tmp_path: Path
) -> None:
    renaming = open_local(SwapFileSystem)
    renaming.put("a", b"zero")
    with pytest.raises(errors.ConfigError):
        renaming.put("a", b"refused")
    store = open_local(SwapFileSystem, promises=Promises(writes="swap"))
    for data in (b"one", b"two"):
        store.put("a", data)
        assert store.get("a") == data
    assert files(tmp_path) == ["a"]


def test_key_that_continues_another_is_refused(open_local: Open, tmp_path: Path) -> None:
    store = open_local()
    store.put("a/b", b"data")
    for key in ("a/b/c", "a"):
        with pytest.raises(errors.ConfigError, match="in the place of a folder"):
            store.put(key, b"data")
    assert files(tmp_path) == ["a/b"]
