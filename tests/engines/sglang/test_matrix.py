"""Model families in SGLang against the scatter plan: each tensor written, loaded or refused."""

from __future__ import annotations

from typing import Final

import pytest

from tests.engines.families import FAMILIES, checkpoint
from tests.engines.matrix import Row, examine
from tests.engines.sglang.fresh import load_fresh
from tests.engines.two_ranks import two_ranks

pytestmark = pytest.mark.engine

FIRST: Final = ("qwen3", "gpt2", "gemma", "qwen3_moe", "gpt_oss")
"""Fused and sharded, transposed, edited by the loader, experts, served in fp32."""

TWO: Final = ("qwen3", "qwen2", "llama_v500", "gemma3", "phi3", "gpt2", "mistral", "olmo2", "opt")

UNKNOWN: Final = {
    "exaone4": TypeError,
    "olmoe": AssertionError,
    "phimoe": ValueError,
    "qwen3_next": AttributeError,
    "mamba2": AttributeError,
    "falcon": ValueError,
    "bloom": ValueError,
    "mamba": ValueError,
    "jamba": ValueError,
}
"""Families that SGLang itself does not load in these sizes, and how it says so."""

UNLOADED: Final = {"llama4_text"}
"""SGLang leaves out experts that are fused in the checkpoint: they hold whatever was in memory."""

KNOWN: Final = [name for name in FAMILIES if name not in UNKNOWN and name not in UNLOADED]


def right(row: Row) -> Row:
    """A row without anything that is silently wrong, and with every tensor accounted for."""
    assert row.wrong == []
    assert row.undone_wrong == []
    assert row.digest
    assert row.refused or sum(row.classes.values()) == row.tensors
    return row


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in FIRST else pytest.mark.slow) for f in KNOWN]
)
def test_every_tensor_is_written_loaded_or_refused(family: str) -> None:
    assert right(Row(**examine(0, family))).refused == ""


@pytest.mark.slow
def test_experts_that_view_one_storage_are_told_apart() -> None:
    assert right(Row(**examine(0, "afmoe"))).classes == {"in_place": 44, "loaded": 1}


@pytest.mark.slow
def test_a_layer_that_the_loader_drops_is_made_again_beside_the_model() -> None:
    row = right(Row(**examine(0, "minicpm3")))
    assert (row.refused, row.classes) == ("", {"repacked": row.tensors})


@pytest.mark.slow
@pytest.mark.parametrize("family", UNKNOWN)
def test_what_is_left_out_can_not_be_loaded(family: str) -> None:
    with pytest.raises(UNKNOWN[family]):
        load_fresh(checkpoint(family))


@pytest.mark.slow
def test_two_ranks() -> None:
    for rows in two_ranks("tests.engines.matrix:examine_two", *TWO, deadline_s=600):
        for row in rows:
            assert right(Row(**row)).classes == {"in_place": row["tensors"]}


def test_some_families_on_two_ranks() -> None:
    families = ("qwen3", "llama_v500", "qwen3_moe")
    for rows in two_ranks("tests.engines.matrix:examine_two", *families):
        for row in rows:
            assert right(Row(**row)).classes == {"in_place": row["tensors"]}
