from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltachain import store as stores
from deltachain.errors import ConfigError
from deltachain.store import FileStore, MemoryStore, check_key, open_store


def test_memory_url_opens_the_shared_store() -> None:
    assert open_store("memory://test-open/run-1") is open_store("memory://test-open/run-1")
    assert isinstance(open_store("memory://test-open"), MemoryStore)
    assert open_store("memory://test-open").url == "memory://test-open"


def test_paths_and_file_urls_are_the_same_store(tmp_path: Path) -> None:
    folder = tmp_path / "run 1#?%41ä"
    for url in (folder, str(folder), folder.as_uri(), f"file://localhost{folder.as_uri()[7:]}"):
        opened = open_store(url)
        assert isinstance(opened, FileStore)
        assert opened.url == folder.as_uri()
    open_store(folder).put("a", b"data")
    assert open_store(open_store(folder).url).get("a") == b"data"


def test_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened = open_store("runs/1")
    monkeypatch.chdir("/")
    opened.put("a", b"data")
    assert (tmp_path / "runs/1/a").read_bytes() == b"data"


def test_a_tilde_is_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for place in ("~/run", Path("~/run")):
        assert open_store(place).url == (tmp_path / "home" / "run").as_uri()
    assert open_store("runs/~x").url == (tmp_path / "runs" / "~x").as_uri()


@pytest.mark.parametrize("place", [None, "", 3, b"folder", ["folder"]])
def test_what_is_no_location_is_refused(place: Any) -> None:
    with pytest.raises(ConfigError, match="URL or a path") as caught:
        open_store(place)
    assert "s3://" in caught.value.hint


@pytest.mark.parametrize(
    "place",
    [
        *("s3//chains/run1", "S3//chains/run1", "s3:chains/run1", "s3;//chains/run1"),
        *("hf//buckets/me/b/r", "gs//b/run", "az:c/run", "file:chains/run", "memory//a"),
        *(" s3://user:secret@b/run", "'s3://b/secret'", "url=s3://b/secret"),
        *("https//host/secret", Path("s3:b/run")),
    ],
)
def test_what_is_nearly_a_url_is_no_folder(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="a store") as caught:
        open_store(place)
    assert "a URL begins with" in caught.value.hint
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "place", ["s3/run", "./s3//run", "runs//1", "a:b", "gs", "/a:b//c", "b/s3:c"]
)
def test_what_is_not_nearly_a_url_is_a_folder(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_store(place), FileStore)


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "chain.json").write_bytes(b"{}")
    for place in (tmp_path / "chain.json", tmp_path / "chain.json" / "run"):
        with pytest.raises(ConfigError, match="not a folder") as caught:
            open_store(place).put("a", b"data")
        assert "name" in caught.value.hint


def test_opening_writes_nothing(tmp_path: Path) -> None:
    opened = open_store(tmp_path / "absent")
    assert list(opened.list()) == []
    assert opened.find("a") is None
    opened.delete("a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "nfs://user:secret@host/x",
        "s3://key:secret@bucket/x",
        "file://user:secret@host/x",
        "file:///x?token=secret",
        "file:///x#secret",
        "memory://x?token=secret",
    ],
)
def test_refusal_does_not_show_what_may_be_a_credential(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)
    assert url.partition(":")[0] in str(caught.value)


@pytest.mark.parametrize(
    "url", ["", "a\0b", "file:///", "file://folder", "file:///a%00b", "memory://", "memory:///"]
)
def test_url_without_a_place_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_store(url)


def test_check_key_returns_the_key_and_names_the_bad_segment() -> None:
    assert check_key("deltas/1/part.safetensors") == "deltas/1/part.safetensors"
    with pytest.raises(ConfigError, match=r"'\.\.' is not a name"):
        check_key("deltas/../head.json")


def test_exports_are_complete() -> None:
    assert sorted(stores.__all__) == stores.__all__
    assert all(name in vars(stores) for name in stores.__all__)
