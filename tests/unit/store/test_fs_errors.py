from __future__ import annotations

import errno
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from deltachain.errors import ConfigError, StorePermissionError, StoreUnavailableError
from deltachain.store import MemoryStore, open_store
from deltachain.store.fs import FsspecStore, Promises, open_fsspec

pytest.importorskip("fsspec")
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry as REGISTRY  # noqa: N812

from tests.unit.store.calls import calls_of

CREATES = Promises(writes="put", create={"mode": "create"}, list_consistent=True)


@pytest.fixture
def memory_fs() -> MemoryFileSystem:
    filesystem = MemoryFileSystem(skip_instance_cache=True)
    filesystem.store, filesystem.pseudo_dirs = {}, [""]  # by default all share one
    return filesystem


# Errors


class HttpError(Exception):
    """What gcsfs raises: no OSError."""

    def __init__(self, code: object) -> None:
        super().__init__("said by the library")
        self.code = code


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError(errno.EACCES, "no"), StorePermissionError),
        (OSError("Forbidden: bucket/x"), StorePermissionError),
        (HttpError(403), StorePermissionError),
        (HttpError("401"), StorePermissionError),
        (HttpError(503), StoreUnavailableError),
        (TimeoutError(), StoreUnavailableError),
        (ConnectionResetError(errno.ECONNRESET, "reset"), StoreUnavailableError),
        (OSError("https://user:secret@host/x?sig=secret failed"), StoreUnavailableError),
        (RecursionError("said by the library"), StoreUnavailableError),  # nobody foresaw it
    ],
)
def test_errors_say_what_to_do(
    memory_fs: MemoryFileSystem,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    expected: type[Exception],
) -> None:
    module = type(sys)("gcsfs.retry")
    module.HttpError = HttpError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gcsfs.retry", module)
    store = FsspecStore(memory_fs, "bucket", promises=CREATES)
    store.put("a", b"data")

    def fail(*_args: object, **_kwargs: object) -> None:
        raise error

    for method in ("info", "cat_file", "pipe_file", "rm_file", "find"):
        setattr(memory_fs, method, fail)
    for call in [*calls_of(store), lambda: store.put_if_absent("b", b"")]:
        with pytest.raises(expected) as caught:
            call()
        assert caught.value.__cause__ is error
        assert "secret" not in str(caught.value)
        if isinstance(error, RecursionError):
            assert "unexpected RecursionError" in str(caught.value)


def test_bucket_that_is_not_there(memory_fs: MemoryFileSystem) -> None:
    store = FsspecStore(memory_fs, "bucket", promises=CREATES)

    def fail(*_args: object, **_kwargs: object) -> None:
        raise FileNotFoundError("bucket")

    for method in ("pipe_file", "find"):
        setattr(memory_fs, method, fail)
    for write in (store.put, store.put_if_absent):
        with pytest.raises(StoreUnavailableError, match="no place for it") as caught:
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
    with pytest.raises(ConfigError, match="port") as caught:
        open_store("sftp://me:secret@host/x", {"port": 22})
    assert "secret" not in str(caught.value)


def test_memory_url_of_fsspec_is_not_ours() -> None:
    assert isinstance(open_fsspec("memory://test-fs/chain"), FsspecStore)
    assert isinstance(open_store("memory://test-fs/chain"), MemoryStore)
    assert open_fsspec("memory://test-fs/chain").url == "memory://test-fs/chain"


@pytest.mark.parametrize(
    ("scheme", "package", "extra"),
    [("gs", "gcsfs", "gcs"), ("az", "adlfs", "azure"), ("abfs", "adlfs", "azure")],
)
def test_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, scheme: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    monkeypatch.delitem(REGISTRY, scheme, raising=False)
    with pytest.raises(ConfigError, match="not installed") as caught:
        open_store(f"{scheme}://bucket/prefix")
    assert caught.value.hint == f"pip install 'deltachain[{extra}]'"


def test_missing_package_of_a_protocol_without_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boxfs", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        open_store("box://folder")
    assert "boxfs" in caught.value.hint


@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gcs"), ("az", "azure"), ("sftp", "fsspec")])
def test_missing_fsspec_is_named(monkeypatch: pytest.MonkeyPatch, scheme: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match=f"{scheme}://") as caught:
        open_store(f"{scheme}://bucket")
    assert f"deltachain[{extra}]" in caught.value.hint


def test_unknown_scheme_is_answered_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match="nonsense://") as caught:
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
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)
    assert url.partition(":")[0] in str(caught.value)


@pytest.mark.parametrize("url", ["memory://", "memory:///"])
def test_url_without_a_place_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="bucket"):
        open_fsspec(url)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "127.0.0.1:9"])
def test_a_web_server_that_does_not_answer_has_no_absent_objects(host: str) -> None:
    pytest.importorskip("aiohttp")
    store = open_store(f"http://{host}/chain")
    for look in (
        lambda: store.find("a"),
        lambda: store.get("a"),
        lambda: store.get_range("a", 0, 1),
    ):
        with pytest.raises(StoreUnavailableError) as caught:
            look()
    assert ("check the host in the URL" in caught.value.hint) == ("invalid" in host)


@pytest.mark.parametrize(
    ("status", "is_absent"), [(404, True), (403, True), (503, False), (429, False)]
)
def test_what_a_web_server_answers_tells_absence_from_trouble(status: int, is_absent: bool) -> None:
    pytest.importorskip("aiohttp")

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        do_HEAD = do_GET  # noqa: N815 - a name of the library

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        store = open_store(f"http://127.0.0.1:{server.server_port}/chain")
        if is_absent:
            assert store.find("a") is None
        else:
            with pytest.raises(StoreUnavailableError):
                store.find("a")
        server.shutdown()
