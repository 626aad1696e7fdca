"""Plans decoded once for a host: what goes in comes out, and nothing stays behind."""

from __future__ import annotations

import errno
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from deltachain.chain.fetch import Fetched
from deltachain.delta import ABSOLUTE, STEP, TensorDelta
from deltachain.errors import ApplyError, BrokenChainError
from deltachain.replica import spool as spool_module
from deltachain.replica.spool import ALIGN, DATA, Spool, SpoolReader
from deltachain.types import BITS_DTYPES, TensorSpec

DTYPES = {1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "I64"}


def plan(
    *deltas: TensorDelta, from_nothing: bool = False, failure: Exception | None = None
) -> Fetched:
    """As much of a fetched plan as a spool needs."""

    def decoded() -> Iterator[TensorDelta]:
        yield from deltas
        if failure is not None:
            raise failure

    nbytes = sum(delta.nbytes for delta in deltas)
    return cast(
        "Fetched", SimpleNamespace(deltas=decoded, from_nothing=from_nothing, nbytes=nbytes)
    )


def delta(kind: str, width: int = 2, name: str = "w") -> TensorDelta:
    """A delta of some of 100 elements, or of all."""
    rng = np.random.default_rng(width)
    spec = TensorSpec(name, DTYPES[width], (10, 10))
    bits = rng.integers(1, 250, 100).astype(BITS_DTYPES[width])
    if kind == "dense":
        return TensorDelta.dense(spec, bits)
    indices = np.flatnonzero(rng.random(100) < (0 if kind == "empty" else 0.3))
    masks = {"absolute": ABSOLUTE, "mixed": rng.random(indices.size) < 0.5}
    return TensorDelta(
        spec=spec, indices=indices, values=bits[indices], absolute=masks.get(kind, STEP)
    )


def equal(one: TensorDelta, other: TensorDelta) -> bool:
    pairs = [(one.values, other.values), (one.absolute, other.absolute)]
    if one.indices is not None and other.indices is not None:
        pairs.append((one.indices, other.indices))
    return (
        one.spec == other.spec
        and one.is_dense == other.is_dense
        and all(a.dtype == b.dtype and a.shape == b.shape and (a == b).all() for a, b in pairs)
    )


KINDS = ("step", "absolute", "mixed", "dense", "empty")


@pytest.mark.parametrize("width", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_in_comes_out(tmp_path: Path, kind: str, width: int) -> None:
    given = delta(kind, width)
    spool = Spool.write(tmp_path, plan(given))
    (found,) = SpoolReader(spool.folder)
    assert equal(found, given.validate() if kind != "empty" else given)
    assert spool.nnz == given.nnz


def test_tensors_come_in_order_and_by_name(tmp_path: Path) -> None:
    given = [delta(kind, width, f"{kind}.{width}") for kind in KINDS for width in DTYPES]
    spool = Spool.write(tmp_path, plan(*given))
    reader = SpoolReader(spool.folder)
    assert all(equal(a, b) for a, b in zip(reader, given, strict=True))
    assert equal(reader.read("mixed.4"), given[10])
    assert spool.nnz == sum(one.nnz for one in given)
    offsets = [o for row in reader.rows.values() for o in (row.values, row.indices, row.mask)]
    assert all(offset % ALIGN == 0 for offset in offsets if type(offset) is int)


def test_ranks_read_and_can_not_write(tmp_path: Path) -> None:
    spool = Spool.write(tmp_path, plan(delta("mixed")))
    (found,) = SpoolReader(spool.folder)
    for array in (found.values, found.indices, found.absolute):
        assert isinstance(array, np.ndarray)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_a_plan_that_changes_nothing_is_a_spool_too(tmp_path: Path) -> None:
    spool = Spool.write(tmp_path, plan())
    reader = SpoolReader(spool.folder)
    assert list(reader) == []
    assert spool.nnz == 0
    assert not reader.from_nothing


def test_a_plan_from_nothing_says_so_and_gives_every_tensor_whole(tmp_path: Path) -> None:
    spool = Spool.write(tmp_path, plan(delta("dense"), from_nothing=True))
    assert SpoolReader(spool.folder).from_nothing
    spool.close()
    with pytest.raises(BrokenChainError, match="gives only"):
        Spool.write(tmp_path, plan(delta("absolute"), from_nothing=True))
    assert list(tmp_path.iterdir()) == []


# How long it lives


def test_it_goes_with_its_owner(tmp_path: Path) -> None:
    spool = Spool.write(tmp_path, plan(delta("dense")))
    assert len(list(tmp_path.iterdir())) == 1
    del spool
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_closing_twice_is_allowed_and_leaves_others_alone(tmp_path: Path) -> None:
    one, other = (Spool.write(tmp_path, plan(delta("dense"))) for _ in range(2))
    one.close()
    one.close()
    assert list(tmp_path.iterdir()) == [other.folder]


def test_who_mapped_it_keeps_it(tmp_path: Path) -> None:
    given = delta("mixed")
    spool = Spool.write(tmp_path, plan(given))
    reader = SpoolReader(spool.folder)
    spool.close()
    assert equal(reader.read("w"), given)
    with pytest.raises(FileNotFoundError):
        SpoolReader(spool.folder)


# Where there is no room, or no right


def test_a_full_disk_is_said_with_a_way_out_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool_module, "_put", full)
    with pytest.raises(ApplyError, match="No space left on device") as caught:
        Spool.write(tmp_path / "spool", plan(delta("dense")))
    assert "DELTACHAIN_SPOOL" in caught.value.hint
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_folder_that_is_none_is_said_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "spool").write_bytes(b"")
    with pytest.raises(ApplyError, match="could not be decoded there") as caught:
        Spool.write(tmp_path / "spool", plan(delta("dense")))
    assert "DELTACHAIN_SPOOL" in caught.value.hint


def test_what_can_not_be_decoded_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        Spool.write(tmp_path, plan(delta("dense"), failure=ZeroDivisionError()))
    assert list(tmp_path.iterdir()) == []


def test_only_its_user_can_look_into_it(tmp_path: Path) -> None:
    spool = Spool.write(tmp_path / "spool", plan(delta("dense")))
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700
    assert spool.folder.stat().st_mode & 0o777 == 0o700
    assert (spool.folder / DATA).stat().st_size >= 200


def test_what_a_killed_leader_left_is_swept_away(tmp_path: Path) -> None:
    mine = Spool.write(tmp_path, plan(delta("dense")))
    for folder in (f"{spool_module.PREFIX}left", "other"):  # the latter, no leader has made
        (tmp_path / folder).mkdir()
        for name in ("data", "index.json", "lock"):
            (tmp_path / folder / name).write_bytes(b"")
    another = Spool.write(tmp_path, plan(delta("mixed")))
    assert {one.name for one in tmp_path.iterdir()} == {
        mine.folder.name,
        another.folder.name,
        "other",
    }
    assert equal(SpoolReader(mine.folder).read("w"), delta("dense"))
    assert len(list((tmp_path / "other").iterdir())) == 3


def test_several_leaders_share_a_folder(tmp_path: Path) -> None:
    """One that is being made must not look like one that was left."""

    def make(_: int) -> bool:
        spool = Spool.write(tmp_path, plan(delta("mixed")))
        return equal(SpoolReader(spool.folder).read("w"), delta("mixed"))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(make, range(300)))
    assert list(tmp_path.iterdir()) == []
