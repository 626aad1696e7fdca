import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file

from examples.demo import compare_bits


class Tied(torch.nn.Module):
    """Two names for one weight, one of another kind, and a persistent buffer."""

    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.nn.Parameter(torch.randn(7, 5, generator=generator))
        self.head = self.embed
        self.scale = torch.nn.Parameter(torch.tensor(-0.0))
        self.register_buffer("offset", torch.randn(3, generator=generator))


SIZE = 7 * 5 + 1 + 3


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "dump.npz"
    compare_bits.dump_bits(Tied(), path)
    return path


def checkpoint(folder: Path, *, drop: str = "head", **changed: torch.Tensor) -> Path:
    state = {name: tensor.detach().bfloat16() for name, tensor in Tied().state_dict().items()}
    state |= changed
    state.pop(drop)
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "m.safetensors")
    return folder


def test_a_dump_holds_every_tensor_as_int16(dump: Path) -> None:
    with np.load(dump, allow_pickle=False) as archive:
        bits = {name: archive[name] for name in archive.files if not name.startswith("__")}
    assert set(bits) == {"embed", "head", "scale", "offset"}
    assert all(array.dtype == np.int16 for array in bits.values())
    assert bits["scale"] == np.int16(-0x8000)


@pytest.mark.parametrize("name", ["embed", "head"])
def test_either_of_two_tied_names_is_enough(dump: Path, tmp_path: Path, name: str) -> None:
    result = compare_bits.compare(dump, checkpoint(tmp_path / "held", drop=name))
    assert result.equal
    assert (result.elements, result.mismatching_bits) == (SIZE, 0)


def test_a_wrong_alias_counts_although_the_other_name_is_right(dump: Path, tmp_path: Path) -> None:
    wrong = (-Tied().head).detach().bfloat16()
    held = checkpoint(tmp_path / "held", drop="scale", head=wrong, scale=torch.tensor(0.0))
    result = compare_bits.compare(dump, held)
    assert (result.different, result.missing) == (("head",), ("scale",))
    assert result.mismatching_bits == wrong.numel() + 16


@pytest.mark.parametrize("bit", range(16))
def test_one_flipped_bit_is_counted_as_one(dump: Path, tmp_path: Path, bit: int) -> None:
    offset = Tied().offset.bfloat16().view(torch.int16)
    mask = torch.tensor([0, 1 << bit, 0]).to(torch.int16)
    flipped = offset.bitwise_xor(mask)
    held = checkpoint(tmp_path / "held", offset=flipped.view(torch.bfloat16))
    result = compare_bits.compare(dump, held)
    assert result.different == ("offset",)
    assert (result.elements, result.mismatching_bits) == (SIZE, 1)


def test_a_missing_tensor_counts_with_all_its_bits(dump: Path, tmp_path: Path) -> None:
    held = checkpoint(tmp_path / "held", drop="embed")
    state = {"scale": torch.tensor(-0.0, dtype=torch.bfloat16)}
    save_file(state, held / "m.safetensors")
    result = compare_bits.compare(dump, held)
    assert set(result.missing) == {"embed", "offset"} or set(result.missing) == {"head", "offset"}
    assert (result.elements, result.mismatching_bits) == (SIZE, (35 + 3) * 16)


def test_an_unexpected_tensor_counts_with_all_its_bits(dump: Path, tmp_path: Path) -> None:
    held = checkpoint(tmp_path / "held", extra=torch.zeros(2, 2, dtype=torch.bfloat16))
    result = compare_bits.compare(dump, held)
    assert result.unexpected == ("extra",)
    assert (result.elements, result.mismatching_bits) == (SIZE + 4, 4 * 16)


@pytest.mark.parametrize(
    "other", [torch.zeros(3), torch.zeros(1, 3).bfloat16()], ids=["dtype", "shape"]
)
def test_another_dtype_or_shape_counts_with_all_its_bits(
    dump: Path, tmp_path: Path, other: torch.Tensor
) -> None:
    result = compare_bits.compare(dump, checkpoint(tmp_path / "held", offset=other))
    assert (result.different, result.mismatching_bits) == (("offset",), 3 * 16)


def test_nothing_compared_is_not_equal(tmp_path: Path) -> None:
    empty = tmp_path / "empty.npz"
    compare_bits.dump_bits(torch.nn.Module(), empty)
    assert not compare_bits.compare(empty, empty).equal


def test_a_truncated_file_is_refused(dump: Path, tmp_path: Path) -> None:
    file = checkpoint(tmp_path / "held") / "m.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="ends after"):
        compare_bits.compare(dump, file)


@pytest.mark.full
def test_it_runs_by_file_path_without_the_package(dump: Path, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "held", offset=torch.ones(3))
    again = tmp_path / "again.npz"
    script = [sys.executable, "-P", compare_bits.__file__]
    done = subprocess.run(
        [*script, "dump", str(folder), str(again)], cwd=tmp_path, capture_output=True, check=True
    )
    assert json.loads(done.stdout)["tensors"] == 3
    done = subprocess.run(
        [*script, "compare", str(dump), str(again)], cwd=tmp_path, capture_output=True, check=False
    )
    outcome = json.loads(done.stdout)
    assert done.returncode == 1
    assert outcome["different"] == ["offset"]
    assert not outcome["equal"]
