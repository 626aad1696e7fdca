"""RuntimeTables that modules make of their weights when they run, and do not make again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deltachain.checkpoint import Checkpoint
from deltachain.errors import TensorMismatchError
from deltachain.replica.layout.discover import discover
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from deltachain.replica.layout.runtime_tables import (
    RuntimeTables,
    made_by_running,
    record_loaded_state,
)
from tests.unit.replica.layout.loaders import PLANNED, SIZE, OneLayer


class Rotary(OneLayer):
    """A layer that makes a table of its weight in its first step, as Fourier embeddings do."""

    table: Tensor
    parts: dict[int, Tensor]
    late: Tensor | None
    kv_cache: list[Tensor]
    steps: int

    def __init__(self) -> None:
        super().__init__(PLANNED["copy"])
        self.table = torch.zeros(SIZE)
        self.cast = torch.arange(4).float() / 3
        self.parts, self.late = {}, None
        self.update = True

    def run(self, length: int = 1) -> Tensor:
        """A step."""
        if self.update:
            self.table = self.p.detach().float().cos()
            self.update = False
        if self.late is None:
            self.late = self.p.detach().float().sin()
        self.cast = self.cast.to(torch.bfloat16)
        if length not in self.parts:
            self.parts[length] = self.p.detach().float() * length
        return self.table + self.parts[length] + self.late

    def made_by_running(self) -> frozenset[str]:
        return made_by_running(self)


Make = Callable[[], tuple[Rotary, LoadedCheckpoint]]


@pytest.fixture
def rotary(tmp_path: Path) -> Make:
    """Makes one that was loaded, and has not run."""

    def make() -> tuple[Rotary, LoadedCheckpoint]:
        full = {"w": torch.randn(SIZE).to(torch.bfloat16)}
        save_file(full, tmp_path / "model.safetensors")
        model = Rotary()
        model.checkpoint = tmp_path
        model.load(full.items())
        record_loaded_state(model)
        checkpoint = Checkpoint(tmp_path)
        return model, LoadedCheckpoint(checkpoint, checkpoint.specs, {})

    return make


def test_what_did_not_run_is_followed(rotary: Make) -> None:
    model, source = rotary()
    assert made_by_running(model) == frozenset()
    assert discover(model, source).classes == {"w": "in_place"}


def test_a_table_that_was_made_by_running_is_refused(rotary: Make) -> None:
    model, source = rotary()
    model.run()
    assert made_by_running(model) == {"table", "late", "parts.1"}
    with pytest.raises(TensorMismatchError, match="late at run time"):
        discover(model, source)


def test_a_cast_is_no_other_table(rotary: Make) -> None:
    model, _ = rotary()
    model.run()
    assert model.cast.dtype is torch.bfloat16
    assert "cast" not in made_by_running(model)


def test_numbers_of_requests_are_no_tables(rotary: Make) -> None:
    model, _ = rotary()
    model.kv_cache = [torch.ones(3)]
    model.taken = torch.ones(3, dtype=torch.int64)
    assert made_by_running(model) == frozenset()


def test_nothing_is_known_of_what_was_not_recorded() -> None:
    model = Rotary()
    model.run()
    assert made_by_running(model) == frozenset()


def test_tables_that_were_made_later_are_forgotten_and_made_again(rotary: Make) -> None:
    model, _ = rotary()
    model.update = False
    tables = RuntimeTables(model.modules())
    model.run(1), model.run(2)
    model.p.data.add_(1)
    model.extra = torch.ones(2)
    tables.forget()
    assert (model.parts, model.late, hasattr(model, "extra")) == ({}, None, False)
    assert torch.equal(model.run(2), 2 * model.p.float() + model.p.float().sin())


def test_what_was_there_is_kept(rotary: Make) -> None:
    model, _ = rotary()
    model.run()
    tables, parts, late = RuntimeTables(model.modules()), dict(model.parts), model.late
    model.kv_cache = [torch.ones(3)]
    model.steps = 7
    tables.forget()
    assert (model.parts, model.late, model.steps) == (parts, late, 7)
    assert len(model.kv_cache) == 1


def test_modules_far_from_weights_are_left_alone() -> None:
    parent = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    tables = RuntimeTables(dict(parent.named_modules()))
    vars(parent)["scratch"] = vars(parent[0])["table"] = torch.ones(2)
    tables.forget()
    assert "scratch" in vars(parent)
    assert "table" not in vars(parent[0])


def test_a_flag_that_says_that_a_table_is_there_is_reset() -> None:
    model = nn.Linear(2, 2)
    vars(model)["ready"], vars(model)["busy"] = False, False
    tables = RuntimeTables({"": model})
    vars(model)["busy"] = True
    tables.forget()
    assert vars(model)["busy"], "no table was made"
    vars(model)["table"], vars(model)["ready"] = torch.ones(2), True
    tables.forget()
    assert not vars(model)["ready"]
    assert "table" not in vars(model)


def test_a_number_that_was_made_by_running_is_known() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    vars(model)["scale"], vars(model)["rate"] = None, float("nan")
    record_loaded_state(model)
    assert made_by_running(model) == frozenset()
    vars(model)["scale"] = 0.5
    assert made_by_running(model) == {"scale"}


class WithLoRA(nn.Linear):
    """What holds adapters beside the weights."""


def test_what_adapters_hold_is_no_table() -> None:
    model = WithLoRA(2, 2)
    record_loaded_state(model)
    vars(model)["A_buffer"] = torch.ones(2)
    assert made_by_running(model) == frozenset()


def test_a_model_that_cannot_be_recorded_is_loaded_and_not_followed() -> None:
    model = nn.LazyBatchNorm1d()  # its buffers have no shape yet
    record_loaded_state(model)
    with pytest.raises(TensorMismatchError, match="LazyBatchNorm1d held when it was loaded"):
        made_by_running(model)  # its tables could not be told from constants
