"""Parts that somebody tampered with. Nothing of them may be taken, and nothing else may happen."""

import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from deltachain import errors
from deltachain.codec import Part
from tests.format import stranger
from tests.format.forge import Forgery, compress, take_apart
from tests.format.forgeries import FORGERIES, PARTS, forged, halves
from tests.format.stranger import RefusedError, UnsupportedError


def read(data: bytes) -> None:
    Part.from_bytes(data, key="part").verify()


def is_refused(data: bytes) -> bool:
    with suppress(errors.FormatError):
        read(data)
        return False
    return True


def is_refused_by_stranger(data: bytes) -> bool:
    with suppress(RefusedError):
        stranger.read_part(data)
        return False
    return True


@pytest.mark.parametrize("name", PARTS)
def test_pieces_put_together_again_are_the_part(name: str) -> None:
    assert take_apart(PARTS[name]).build() == PARTS[name]


@pytest.mark.parametrize(
    ("refuses", "name"), [*((is_refused, name) for name in PARTS), (is_refused_by_stranger, "step")]
)
def test_every_flipped_bit_is_found(refuses: Callable[[bytes], bool], name: str) -> None:
    data = bytearray(PARTS[name])
    accepted = []
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        if not refuses(bytes(data)):
            accepted.append(bit)
        data[bit // 8] ^= 1 << bit % 8
    assert accepted == []
    assert not refuses(bytes(data))


@pytest.mark.parametrize("name", PARTS)
def test_every_truncation_and_every_addition_is_found(name: str) -> None:
    data = PARTS[name]
    assert [n for n in range(len(data)) if not is_refused(data[:n])] == []
    assert is_refused(data + b"\0")
    assert is_refused(data + data)


def test_a_frame_that_was_replaced_is_a_mismatch() -> None:
    data = PARTS["step"]
    with pytest.raises(errors.DigestMismatchError):
        read(data[:-1] + b"\x40")


@pytest.mark.parametrize("name", FORGERIES)
def test_what_breaks_a_rule_is_malformed_though_every_digest_is_right(name: str) -> None:
    data = forged(name)
    assert data not in PARTS.values()
    with pytest.raises(errors.MalformedError):
        read(data)
    assert is_refused_by_stranger(data)


NEWER: dict[str, Callable[[Forgery], object]] = {
    "a format": lambda f: f.metadata.update(deltachain="2"),
    "a compression": lambda f: f.claims.update(compression="lz4"),
    "an encoding": lambda f: f.rows[0].update(encoding="later"),
}


@pytest.mark.parametrize("what", NEWER)
def test_what_is_newer_is_unsupported(what: str) -> None:
    forgery = take_apart(PARTS["step"])
    NEWER[what](forgery)
    data = forgery.build()
    with pytest.raises(errors.UnsupportedFormatError):
        read(data)
    with pytest.raises(UnsupportedError):
        stranger.read_part(data)


def test_metadata_that_nobody_knows_is_ignored() -> None:
    forgery = take_apart(PARTS["step"])
    forgery.claims["zz_later"] = "anything"
    data = forgery.build()
    assert data != PARTS["step"]
    read(data)
    stranger.read_part(data)


def test_streams_may_lie_uncompressed() -> None:
    forgery = take_apart(PARTS["step"])
    forgery.metadata["compression"] = "none"
    data = forgery.build()
    assert b"#0.gap8" in data
    plain, zstd = Part.from_bytes(data).read("w"), Part.from_bytes(PARTS["step"]).read("w")
    assert np.array_equal(plain.values, zstd.values)
    assert stranger.read_part(data)["w"].values == zstd.values.tolist()


def test_a_tensor_may_be_cut_into_segments_anywhere() -> None:
    forgery = take_apart(PARTS["bytes"])
    halves(1, 1)(forgery)
    data = forgery.build()
    cut, whole = Part.from_bytes(data).read("b"), Part.from_bytes(PARTS["bytes"]).read("b")
    assert np.array_equal(cut.values, whole.values)
    assert len(Part.from_bytes(data).directory.segments.start) == 2
    assert stranger.read_part(data)["b"].values == whole.values.tolist()


def peak_of_refusing(data: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(errors.MalformedError):
            read(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_claims_of_much_take_no_memory() -> None:
    claims = [name for name in FORGERIES if "terabyte" in name or "beyond 64 bits" in name]
    assert len(claims) > 3
    for name in claims:
        data = forged(name)
        assert peak_of_refusing(data) < 1 << 20, name


def test_a_directory_that_inflates_to_more_than_the_limit_is_not_inflated() -> None:
    forgery = take_apart(PARTS["step"])
    forgery.on_document = lambda text: text + b" " * (1 << 26)
    assert peak_of_refusing(forgery.build()) < 1 << 20


def test_a_large_directory_of_nothing_takes_bounded_memory() -> None:
    # 1.2 MB of columns in a file of 1.4 KB: the memory they take is bounded by those 1.2 MB.
    forgery = take_apart(PARTS["step"])
    forgery.segments = {name: [0] * 100_000 for name in forgery.segments}
    data = forgery.build()
    assert len(data) < 2000
    assert peak_of_refusing(data) < 8 * int(forgery.metadata["directory_nbytes"])


def test_opening_inflates_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    # A gigabyte of zeros in 50 KB is sound, so opening it must cost nothing.
    frame = compress(bytes(1 << 20))
    forgery = take_apart(PARTS["dense"])
    forgery.rows[0].update(shape=[1 << 29], nnz=1 << 29, segments=512)
    starts = range(0, 1 << 29, 1 << 20)
    forgery.segments.update(start=list(starts), length=[1 << 20] * 512, nnz=[1 << 20] * 512)
    forgery.segments.update({name: [0] * 512 for name in ("gaps", "exceptions", "wide")})
    forgery.on_directory = lambda d: [s.update(raw=[1 << 20] * 512) for s in d["streams"]]
    monkeypatch.setattr(forgery, "frames", lambda _: [frame] * 512)
    data = forgery.build()
    tracemalloc.start()
    try:
        part = Part.from_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert part.rows["w"].spec.nbytes == 1 << 30
