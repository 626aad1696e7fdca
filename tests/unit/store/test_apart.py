"""Places that are written to with rights of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltachain.errors import ConfigError
from deltachain.store import check_apart


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
