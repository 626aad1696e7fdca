from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltachain.format import keys
from deltachain.store.base import check_key

VERSIONS = st.integers(0, 10**20 - 1)


def test_keys_are_those_of_the_format() -> None:
    assert [*("chain.json", "table.json", "head.json")] == [
        keys.CHAIN_KEY,
        keys.TABLE_KEY,
        keys.HEAD_KEY,
    ]
    assert keys.manifest_key(12) == "manifests/00000000000000000012.json"
    assert keys.edge_key(12, "anchor", None) == "edges/00000000000000000012/anchor-nothing.json"
    assert keys.edge_key(12, "skip", 4) == (
        "edges/00000000000000000012/skip-00000000000000000004.json"
    )
    assert keys.payload_key("delta", 12, 3, "ab" * 16, 7) == (
        f"deltas/00000000000000000012-00000003-{'ab' * 16}/00007.safetensors"
    )
    assert keys.asset_key("0123456789abcdef" * 4, "config.json") == (
        f"assets/{'0123456789abcdef' * 2}/config.json"
    )


@given(st.lists(VERSIONS, min_size=2))
def test_keys_of_manifests_sort_as_versions_do(versions: list[int]) -> None:
    named = sorted(keys.manifest_key(version) for version in versions)
    assert named == [keys.manifest_key(version) for version in sorted(versions)]


@given(VERSIONS, VERSIONS, st.sampled_from(["delta", "anchor", "skip"]), st.integers(0, 99_999))
def test_every_key_tells_its_version_and_fits_every_store(
    version: int, base: int, kind: keys.PayloadKind, part: int
) -> None:
    made = [
        keys.manifest_key(version),
        keys.edge_key(version, kind, base),
        keys.edge_key(version, kind, None),
        keys.payload_key(kind, version, 1, "0" * 32, part),
    ]
    assert [keys.version_of(check_key(key)) for key in made] == [version] * 4


@pytest.mark.parametrize(
    "key",
    [
        *("chain.json", "head.json", "assets/00000000000000000001/x", "manifests/12.json", ""),
        *("manifests/0000000000000000000x.json", "other/00000000000000000001.json", "manifests"),
    ],
)
def test_other_keys_have_no_version(key: str) -> None:
    assert keys.version_of(key) is None
