import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltachain.environment import read_secret
from deltachain.errors import ConfigError, TensorMismatchError
from deltachain.format import keys
from deltachain.store.base import check_key
from deltachain.tokens import LARGEST, Tokens
from deltachain.types import (
    BITS_DTYPES,
    MAX_DIMS,
    MAX_NUMEL,
    WIRE_DTYPES,
    StateDigest,
    TensorSpec,
    check_spec,
    mismatch,
)

VERSIONS = st.integers(0, 10**20 - 1)


def test_keys_are_those_of_the_format() -> None:
    named = [keys.CHAIN_KEY, keys.TABLE_KEY, keys.HEAD_KEY]
    assert named == ["chain.json", "table.json", "head.json"]
    assert keys.manifest_key(12) == f"manifests/{12:020}.json"
    assert keys.edge_key(12, "anchor", None) == f"edges/{12:020}/anchor-nothing.json"
    assert keys.edge_key(12, "skip", 4) == f"edges/{12:020}/skip-{4:020}.json"
    payload = f"deltas/{12:020}-00000003-{'ab' * 16}/00007.safetensors"
    assert keys.payload_key("delta", 12, 3, "ab" * 16, 7) == payload
    asset = f"assets/{'0123456789abcdef' * 2}/config.json"
    assert keys.asset_key("0123456789abcdef" * 4, "config.json") == asset
    assert keys.tag_key("a", 0) == "tags/a/00000000.json"


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
        *("tags/a/00000000.json", "tags/a/b/00000000.json"),
    ],
)
def test_other_keys_have_no_version(key: str) -> None:
    assert keys.version_of(key) is None
    assert keys.tag_of(key) == (("a", 0) if key == "tags/a/00000000.json" else None)


@pytest.mark.parametrize("given", [" one\n", "", " ", "\n"])
def test_a_text_is_one_token_or_none(given: str) -> None:
    tokens = Tokens(given)
    assert tokens.current == (("one",) if given.strip() else ())
    assert bool(tokens) == tokens.accepts("one") == bool(given.strip())
    assert not tokens.accepts("other")
    assert not tokens.accepts("")


def test_a_file_has_a_token_a_line_and_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    tokens = Tokens(file)
    assert list(tokens.current) == ["old"]
    file.write_text("new\r\n\nold\n")
    assert list(tokens.current) == ["new", "old"]
    assert tokens.accepts("new")
    assert tokens.accepts("old")
    file.write_text("new")
    assert not tokens.accepts("old")


def test_a_file_behind_a_link_is_read_again_as_kubernetes_replaces_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(name)
    data, file = tmp_path / "data", tmp_path / "token"
    data.symlink_to(tmp_path / "one")
    file.symlink_to(data / "token")
    tokens = Tokens(file)
    assert tokens.current == ("one",)
    following = tmp_path / "following"
    following.symlink_to(tmp_path / "two")
    following.rename(data)
    assert tokens.current == ("two",)


@pytest.mark.parametrize("broken", [None, b"", b"\n", b"\xff", b"a\x00b", b"x" * (LARGEST + 1)])
def test_a_file_that_breaks_keeps_its_last_tokens_and_is_told_once(
    tmp_path: Path, broken: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    tokens = Tokens(file)
    if broken is None:
        file.unlink()
    else:
        file.write_bytes(broken)
    with caplog.at_level(logging.WARNING, "deltachain"):
        for _ in range(3):
            assert tokens.current == ("one",)
            assert not tokens.accepts("")
    (told,) = caplog.messages
    assert "the tokens read before stay in use" in told
    file.write_text("two")
    assert tokens.current == ("two",)


@pytest.mark.parametrize("broken", [None, b"", b" \n", b"\xff", b"a\x00b", b"x" * (LARGEST + 1)])
def test_a_start_without_a_valid_file_is_refused(tmp_path: Path, broken: bytes | None) -> None:
    file = tmp_path / "token"
    if broken is not None:
        file.write_bytes(broken)
    with pytest.raises(ConfigError, match=str(file)) as caught:
        Tokens(file)
    assert caught.value.hint
    with pytest.raises(ConfigError):
        Tokens(tmp_path)


def test_the_environment_has_a_token_or_its_file_and_not_both() -> None:
    assert read_secret({}, "TOKEN") == ""
    assert read_secret({"DELTACHAIN_TOKEN": "a"}, "TOKEN") == "a"
    assert read_secret({"DELTACHAIN_TOKEN_FILE": "/a"}, "TOKEN") == Path("/a")
    both = {"DELTACHAIN_TOKEN_FILE": "/a", "DELTACHAIN_TOKEN": "very secret"}
    with pytest.raises(ConfigError, match="are both set") as caught:
        read_secret(both, "TOKEN")
    assert "very secret" not in str(caught.value)


LANES = st.integers(0, (1 << 64) - 1)
DIGESTS = st.builds(StateDigest, LANES, LANES)


@given(DIGESTS, DIGESTS, DIGESTS)
def test_state_digests_add_up_in_any_order(a: StateDigest, b: StateDigest, c: StateDigest) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + StateDigest() == a
    assert (a + b) - b == a
    assert a - a == StateDigest()


@given(DIGESTS)
def test_state_digests_have_one_text(digest: StateDigest) -> None:
    assert len(str(digest)) == 32
    assert StateDigest.parse(str(digest)) == digest


@pytest.mark.parametrize(
    "text",
    ["", "x", "0" * 31, "A" * 32, "0" * 33, "0x" + "0" * 30, " " + "0" * 31, "٣" * 32, "g" * 32],
)
def test_other_texts_are_no_state_digest(text: str) -> None:
    with pytest.raises(ConfigError):
        StateDigest.parse(text)


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_every_dtype_has_bits_of_its_width(dtype: str) -> None:
    spec = TensorSpec("w", dtype, (3, 5))
    assert spec.bits_dtype == BITS_DTYPES[WIRE_DTYPES[dtype]]
    assert (spec.numel, spec.nbytes) == (15, 15 * spec.bits_dtype.itemsize)
    assert spec.bits_dtype.byteorder in "<=|"


@pytest.mark.parametrize(
    "shape", [(), (0,), (0, 1 << 60), (MAX_NUMEL,), (1 << 24, 1 << 24), (1,) * MAX_DIMS]
)
def test_shapes_up_to_the_limits_are_tensors(shape: tuple[int, ...]) -> None:
    assert TensorSpec("w", "U8", shape).numel in (0, 1, MAX_NUMEL)


@pytest.mark.parametrize(
    ("dtype", "shape", "why"),
    [
        ("U8", (-1,), r"layer\.w"),
        ("U8", (-2, -2), r"layer\.w"),
        ("U8", (MAX_NUMEL + 1,), r"layer\.w"),
        ("U8", (1 << 25, 1 << 24), r"layer\.w"),
        ("U8", (1,) * (MAX_DIMS + 1), f"{MAX_DIMS + 1} dimensions"),
        *((dtype, (), "wire form") for dtype in ("", "bf16", "F4", "C64")),
    ],
)
def test_what_is_no_tensor_is_refused(dtype: str, shape: tuple[int, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        TensorSpec("layer.w", dtype, shape)


def test_a_mismatch_names_dtype_and_shape_in_both_places() -> None:
    spec = TensorSpec("w", "BF16", (2, 3))
    assert mismatch("w", spec, "here", ("BF16", (2, 3)), "there") == ""
    assert mismatch("w", spec, "a.bin", ("F32", (5,)), "b.bin") == (
        "'w' is BF16[2, 3] in a.bin, F32[5] in b.bin"
    )
    assert mismatch("w", spec, "here", None, "there").endswith("missing in there")
    with pytest.raises(TensorMismatchError, match="missing in here") as caught:
        check_spec("w", None, "here", spec)
    assert caught.value.tensor == "w"
