"""Objects of a plan in a folder of one host: what goes in comes out, and nothing stays behind."""

import errno
import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltachain.chain.tensor_plan import TensorPlan
from deltachain.codec import Change, Part, encode_part
from deltachain.delta import ABSOLUTE, STEP, TensorDelta, fold_all
from deltachain.errors import ApplyError, BrokenChainError, DigestMismatchError
from deltachain.replica import spool as spool_module
from deltachain.replica.spool import Spool, SpoolIndex, SpoolReader, object_file
from deltachain.replica.staged import Share, stage
from deltachain.subscribe.targets.tensor_patch import WholeTensor
from deltachain.types import BITS_DTYPES, Bits, StateDigest, TensorSpec
from tests.support.spools import spool_of, spool_of_parts

DTYPES = {1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "I64"}
ROWS = 300
SPAN = (70, 190)
"""A range of flat indices, as of a rank that holds some rows."""


def delta(kind: str, width: int = 2, name: str = "w", seed: int = 0) -> TensorDelta:
    """A delta of some of 300 elements, or of all."""
    rng = np.random.default_rng(10 * seed + width)
    spec = TensorSpec(name, DTYPES[width], (ROWS // 10, 10))
    bits = rng.integers(1, 250, ROWS).astype(BITS_DTYPES[width])
    if kind == "dense":
        return TensorDelta.dense(spec, bits)
    indices = np.flatnonzero(rng.random(ROWS) < 0.3)
    masks = {"absolute": ABSOLUTE, "mixed": rng.random(indices.size) < 0.5}
    return TensorDelta(
        spec=spec, indices=indices, values=bits[indices], absolute=masks.get(kind, STEP)
    )


def applied(found: TensorDelta, old: Bits) -> Bits:
    """All bits of a tensor after a delta."""
    new = old.copy()
    if found.indices is None:
        new[found.start : found.start + found.nnz] = found.values
    else:
        new[found.indices] = found.new_bits(new[found.indices])
    return new


def old_bits(width: int) -> Bits:
    """All bits of a tensor before any delta."""
    return np.arange(ROWS).astype(BITS_DTYPES[width])


def pieces(spool: Spool) -> list[TensorPlan]:
    return list(SpoolReader(spool.folder).tensor_plans())


KINDS = ("step", "absolute", "mixed", "dense")


@pytest.mark.parametrize("width", DTYPES)
@pytest.mark.parametrize("last", KINDS)
@pytest.mark.parametrize("first", ["nothing", *KINDS])
def test_what_goes_in_comes_out_folded(tmp_path: Path, first: str, last: str, width: int) -> None:
    plan = [delta(last, width, seed=3)]
    if first != "nothing":
        plan = [delta(first, width, seed=1), delta("step", width, seed=2), *plan]
    (piece,) = pieces(spool_of(tmp_path, *([one] for one in plan)))
    wanted = applied(fold_all(plan), old_bits(width))
    for low, high in ((0, ROWS), SPAN):
        found = applied(piece.read(low, high), old_bits(width))
        np.testing.assert_array_equal(found[low:high], wanted[low:high])


def test_only_frames_of_the_elements_are_read(tmp_path: Path) -> None:
    """A rank that holds the last rows does not inflate what is before them."""
    numel = 5 << 20
    spec = TensorSpec("w", "U8", (numel,))
    bits = np.random.default_rng(0).integers(0, 256, numel).astype(np.uint8)
    spool = spool_of(tmp_path, [TensorDelta.dense(spec, bits)], from_nothing=True)
    file = object_file(spool.folder, 0)
    data = bytearray(file.read_bytes())
    (stream,) = Part.from_bytes(bytes(data)).directory.streams
    at = len(data) - sum(stream.stored)  # of the first frame
    data[at] ^= 1
    file.write_bytes(data)
    (piece,) = pieces(spool)
    found = piece.read(1 << 20, numel)
    np.testing.assert_array_equal(found.values, bits[1 << 20 :])
    assert found.start == 1 << 20
    with pytest.raises(DigestMismatchError):
        piece.read(0, numel)


def test_tensors_come_in_order(tmp_path: Path) -> None:
    given = [
        delta(kind, width, f"{kind}.{width}") for kind in ("step", "dense") for width in DTYPES
    ]
    found = pieces(spool_of(tmp_path, given))
    assert [piece.spec for piece in found] == [one.spec for one in given]


def test_a_plan_that_changes_nothing_is_a_spool_too(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path, SpoolIndex())
    assert pieces(spool) == []
    assert not SpoolReader(spool.folder).from_nothing


def test_a_plan_from_nothing_gives_every_element(tmp_path: Path) -> None:
    spool = spool_of(tmp_path, [delta("dense")], [delta("step")], from_nothing=True)
    assert SpoolReader(spool.folder).from_nothing
    (piece,) = pieces(spool)
    assert piece.read(*SPAN).covers(*SPAN)
    (piece,) = pieces(spool_of(tmp_path, [delta("absolute")], from_nothing=True))
    with pytest.raises(BrokenChainError, match="gives only"):
        piece.read(*SPAN)


def test_windows_of_several_objects_are_joined(tmp_path: Path) -> None:
    """As an anchor of several trainer ranks: each object has some rows."""
    spec = TensorSpec("w", "BF16", (ROWS // 10, 10))
    bits = old_bits(2) + np.uint16(7)
    parts = []
    for low, high in pairwise((0, 40, 130, ROWS)):
        rows = TensorDelta(
            spec=spec, indices=np.arange(low, high), values=bits[low:high], absolute=ABSOLUTE
        )
        parts.append(encode_part([Change(rows, StateDigest(), windows=True)]))
    spool = spool_of_parts(tmp_path, parts, from_nothing=True)
    for number, part in enumerate(parts):
        spool.put(number, part.data)
    (piece,) = pieces(spool)
    for low, high in ((0, ROWS), SPAN, (0, 40), (200, 201)):
        found = piece.read(low, high)
        np.testing.assert_array_equal(
            found.values[low - found.start :][: high - low], bits[low:high]
        )


# While objects arrive


def halves(tmp_path: Path) -> tuple[Spool, list[bytes]]:
    """A spool of two objects of one edge, neither of which has arrived."""
    parts = [encode_part([Change(delta("step", name=n), StateDigest())]) for n in ("a", "b")]
    return spool_of_parts(tmp_path, parts), [part.data for part in parts]


def test_a_piece_is_there_before_later_objects_are(tmp_path: Path) -> None:
    spool, data = halves(tmp_path)
    found = SpoolReader(spool.folder).tensor_plans()
    spool.put(0, data[0])
    assert next(found).spec.name == "a"
    timer = threading.Timer(0.05, spool.put, (1, data[1]))
    timer.start()
    assert next(found).spec.name == "b"
    timer.join()
    assert list(found) == []


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        ("the fetch fails", "deltas/1 was not fetched: the store is gone"),
        ("the fetcher ends", "the process that fetched it has ended"),
        ("it is called away", "the rank cannot wait for it"),
    ],
)
def test_who_waits_is_told_why_nothing_comes(tmp_path: Path, happens: str, why: str) -> None:
    spool, data = halves(tmp_path)
    called_away = threading.Event()
    found = SpoolReader(spool.folder, called_away.is_set).tensor_plans()
    spool.put(0, data[0])
    next(found)
    if happens == "the fetch fails":
        spool.fail(OSError("the store is gone \udcff"))
    elif happens == "the fetcher ends":
        spool.close()
    else:
        called_away.set()
    with pytest.raises(ApplyError, match=why):
        next(found)


def test_an_object_with_another_directory_is_refused(tmp_path: Path) -> None:
    spool, data = halves(tmp_path)
    spool.put(0, data[1])
    with pytest.raises(DigestMismatchError, match="deltas/0"):
        next(SpoolReader(spool.folder).tensor_plans())


def test_memory_keeps_no_second_copy(tmp_path: Path) -> None:
    spool, data = halves(tmp_path)
    part = Part.from_bytes(bytes(data[0]))
    spool.move(0, part)
    assert bytes(part.data) == data[0] == object_file(spool.folder, 0).read_bytes()
    assert spool.nbytes == len(data[0])
    spool.close()
    assert part.read("a").nnz == delta("step", name="a").nnz  # the map outlives the file


def beside_patches(tmp_path: Path, tensors: int) -> int:
    """Bytes of memory that staging takes at most, beside what it keeps."""
    rng = np.random.default_rng(0)
    deltas, live = [], {}
    for number in range(tensors):
        spec = TensorSpec(f"{number:03}", "BF16", (1 << 18,))
        indices = np.flatnonzero(rng.random(1 << 18) < 0.02)
        values = rng.choice([1, 0xFFFF], indices.size).astype(np.uint16)
        deltas.append(TensorDelta(spec=spec, indices=indices, values=values))
        live[spec.name] = WholeTensor(np.zeros(1 << 18, np.uint16))
    spool = spool_of(tmp_path, deltas)
    shares = {name: Share([(("0", 0), one)], 0, 1 << 18) for name, one in live.items()}
    tracemalloc.start()
    try:
        plans = SpoolReader(spool.folder).tensor_plans()
        staged = stage(plans, shares.__getitem__, 1 << 40, threads=1)
        return tracemalloc.get_traced_memory()[1] - staged.nbytes
    finally:
        tracemalloc.stop()


def test_memory_beside_the_patches_is_that_of_a_few_inflated_frames(tmp_path: Path) -> None:
    """Below 3 bytes a change, up to the 16 frames that a thread keeps; decoded, it would be 10."""
    beside_patches(tmp_path, 2)  # compiles, and makes this thread's decompressor
    few, many = beside_patches(tmp_path, 12), beside_patches(tmp_path, 48)
    assert many - few < 3 * 36 * 0.02 * (1 << 18)


# How long it lives


@pytest.mark.full
def test_it_goes_with_its_owner(tmp_path: Path) -> None:
    spool = spool_of(tmp_path, [delta("dense")])
    assert len(list(tmp_path.iterdir())) == 1
    del spool
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_closing_twice_is_allowed_and_leaves_others_alone(tmp_path: Path) -> None:
    one, other = (spool_of(tmp_path, [delta("dense")]) for _ in range(2))
    one.close()
    one.close()
    assert list(tmp_path.iterdir()) == [other.folder]


def test_who_mapped_it_keeps_it(tmp_path: Path) -> None:
    given = delta("step")
    spool = spool_of(tmp_path, [given])
    (piece,) = pieces(spool)
    spool.close()
    np.testing.assert_array_equal(piece.read(0, ROWS).values, given.values)
    with pytest.raises(ApplyError, match="is gone"):
        SpoolReader(spool.folder)


def test_a_spool_that_is_closed_while_it_is_written_goes_all_the_same(tmp_path: Path) -> None:
    """As of a fetch whose update was given up."""
    index = SpoolIndex()
    for _ in range(20):
        spool = Spool.create(tmp_path, index)

        def write(spool: Spool = spool) -> None:
            with suppress(ApplyError):
                for number in range(200):
                    spool.put(number, b"bytes")

        writers = [threading.Thread(target=write) for _ in range(3)]
        for writer in writers:
            writer.start()
        spool.close()
        for writer in writers:
            writer.join()
    assert list(tmp_path.iterdir()) == []


# Where there is no room, or no right


def test_a_full_disk_is_said_with_a_way_out_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool_module, "_put", full)
    with pytest.raises(ApplyError, match="No space left on device") as caught:
        Spool.create(tmp_path / "spool", SpoolIndex())
    assert "DELTACHAIN_SPOOL" in caught.value.hint
    assert list((tmp_path / "spool").iterdir()) == []


def test_only_its_user_can_look_into_it(tmp_path: Path) -> None:
    spool = spool_of(tmp_path / "spool", [delta("dense")])
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700
    assert spool.folder.stat().st_mode & 0o777 == 0o700


def test_what_a_killed_leader_left_is_swept_away(tmp_path: Path) -> None:
    mine = spool_of(tmp_path, [delta("dense")])
    (tmp_path / f"{spool_module.PREFIX}unlocked").mkdir()
    for folder in (f"{spool_module.PREFIX}left", "other"):  # the latter, no leader has made
        (tmp_path / folder).mkdir()
        for name in ("data", "index.json", "lock"):
            (tmp_path / folder / name).write_bytes(b"")
    another = spool_of(tmp_path, [delta("mixed")])
    assert {one.name for one in tmp_path.iterdir()} == {
        mine.folder.name,
        another.folder.name,
        "other",
    }
    assert len(pieces(mine)) == 1
    assert len(list((tmp_path / "other").iterdir())) == 3


@pytest.mark.full
def test_several_leaders_share_a_folder(tmp_path: Path) -> None:
    """One that is being made must not look like one that was left."""

    def make(_: int) -> bool:
        (piece,) = pieces(spool_of(tmp_path, [delta("dense")]))
        return bool((piece.read(0, ROWS).values == delta("dense").values).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(make, range(300)))
    assert list(tmp_path.iterdir()) == []
