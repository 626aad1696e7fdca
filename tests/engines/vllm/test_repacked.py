"""Layers packed again are, bit by bit, those of a fresh load: experts, convolutions, MLA, ties."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from deltachain_vllm.compat import own_loader
from tests.engines.two_ranks import two_ranks
from tests.engines.vllm.repacked import examine

pytestmark = pytest.mark.engine

FIRST = ("qwen3_tied", "qwen3_moe", "deepseek_v3", "mamba2")
REST = (
    "mixtral",
    "olmoe",
    "deepseek_v2",
    "glm4_moe",
    "qwen3_next",
    "mamba",
    "jamba",
    "gpt_oss",
    "granitemoe",
    "llama4_text",
    "phimoe",
    "qwen2_moe",
)


def expect_no_difference(found: dict[str, Any]) -> None:
    assert {key: found[key] for key in ("all", "some", "back")} == {
        "all": [],
        "some": [],
        "back": [],
    }
    assert found["tried"] > 0


@pytest.mark.parametrize(
    "family", [*FIRST, *(pytest.param(f, marks=pytest.mark.slow) for f in REST)]
)
def test_layers_packed_again_are_those_of_a_fresh_load(family: str) -> None:
    expect_no_difference(examine(0, family))


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FIRST, *REST])
def test_layers_beside_plain_linears_too(family: str) -> None:
    expect_no_difference(examine(0, family, plain=True))


@pytest.mark.slow
def test_both_ranks_of_two() -> None:
    for rank in two_ranks("tests.engines.vllm.repacked:examine_two", *FIRST, *REST, deadline_s=900):
        for found in rank.values():
            expect_no_difference(found)


def test_a_loader_without_a_name_stays_that_of_its_tensor() -> None:
    """MiniMax-M2 has such loaders; vLLM's reload raises over them."""
    tensor: Any = torch.nn.Parameter(torch.zeros(2))
    tensor.weight_loader = loader = partial(print, "loaded")
    own_loader(tensor)
    assert tensor.weight_loader is loader
