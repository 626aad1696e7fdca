"""Numbers that attention keeps from its first run on, made of scales that a chain changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from deltachain.checkpoint import Checkpoint
from deltachain.delta import TensorDelta
from deltachain.errors import TensorMismatchError
from deltachain.replica.layout.classes import agree
from deltachain.replica.layout.runtime_tables import record_loaded_state
from deltachain.replica.rank import Rank
from tests.support.spools import spool_of
from tests.unit.replica.layout.scaled import ScaledEngine

OLD, NEW = 0.5, 0.25
"""Scales of keys."""


@pytest.fixture
def engine(tmp_path: Path) -> ScaledEngine:
    full = {"proj.weight": torch.randn(4, 4), "attn.k_scale": torch.tensor([OLD])}
    save_file(full, tmp_path / "model.safetensors")
    made = ScaledEngine(tmp_path, full)
    record_loaded_state(made)
    return made


def attached(engine: ScaledEngine) -> Rank:
    specs = Checkpoint(engine.checkpoint).specs
    rank = Rank(engine, specs.values(), {})
    agreement = agree(specs.values(), [rank.report()])
    assert agreement.classes == {"proj.weight": "in_place", "attn.k_scale": "reloaded"}
    rank.agree(agreement.classes, {n: labels[0] for n, labels in agreement.holders.items()})
    return rank


def swap(rank: Rank, folder: Path) -> None:
    """Bring the new scale."""
    spec = Checkpoint(folder).specs["attn.k_scale"]
    delta = TensorDelta.dense(spec, np.array([NEW], np.float32).view(np.uint32))
    spool = spool_of(folder / "spool", [delta])
    rank.stage(1, spool.folder, 1 << 20)
    rank.swap(1, 1, back=False)


def test_a_number_that_attention_made_of_a_scale_is_refused(engine: ScaledEngine) -> None:
    """It would stay as it is, in captured graphs too."""
    engine.run()
    with pytest.raises(TensorMismatchError, match=r"computed attn\.impl\.bmm1_scale at run time"):
        Rank(engine, Checkpoint(engine.checkpoint).specs.values(), {})
    assert engine.attn._k_scale_float == OLD


def test_a_number_that_attention_makes_later_is_made_again(
    engine: ScaledEngine, tmp_path: Path
) -> None:
    rank = attached(engine)
    engine.run()
    assert engine.attn.impl.bmm1_scale == 0.125 * OLD
    swap(rank, tmp_path)
    assert engine.attn._k_scale_float == NEW
    assert torch.equal(engine.run(), engine.proj(torch.ones(1, 4)) * (0.125 * NEW))
    assert engine.attn.impl.bmm1_scale == 0.125 * NEW


def test_numbers_of_attention_without_scales_in_the_chain_refuse_nothing(tmp_path: Path) -> None:
    full = {"proj.weight": torch.randn(4, 4)}
    save_file(full, tmp_path / "model.safetensors")
    engine = ScaledEngine(tmp_path, full)
    record_loaded_state(engine)
    engine.run()
    rank = Rank(engine, Checkpoint(tmp_path).specs.values(), {})
    assert {one.kind for one in rank.report().values()} == {"in_place"}
