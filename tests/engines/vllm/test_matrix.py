"""Model families against the scatter plan: each tensor written, loaded or refused, none wrong."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltachain.checkpoint import WEIGHTS_FILE
from tests.engines import matrix
from tests.engines.families import FAMILIES, checkpoint
from tests.engines.matrix import Row, examine
from tests.engines.two_ranks import two_ranks
from tests.engines.unusual import UNUSUAL

pytestmark = pytest.mark.engine

FIRST = ("qwen3", "gpt2", "gemma3", "bloom", "llama_v500")
"""Fused and sharded, transposed, tied, computed by the loader, padded with one KV head."""

TWO = ("qwen3", "qwen2", "llama_v500", "gemma3", "phi3", "gpt2", "bloom", "mistral", "olmo2", "opt")

EXPERTS = tuple(
    name
    for name in FAMILIES
    if "moe" in name or name in ("mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_next")
)

CANNOT = {"olmo_hybrid": "module 'triton' has no attribute 'set_allocator'"}
"""Unusual families that this vLLM does not load on a CPU, and what it says."""

UNUSED = {
    "deepseek_v3_mtp": 32,
    "glm4_moe_mtp": 29,
    "llama_inv_freq": 2,
    "llama_gptq": 14,
    "llava": 18,
    "gemma3_seeing": 11,
    "qwen3_5_mtp": 15,
    "cohere2_untied": 1,
}
"""How many tensors of others it does not use: heads for later tokens, tables, orders of columns
that change none, the last layer of a vision tower or its head, a head of its own where it is tied.
"""

HEADS = ("qwen3_tokens", "qwen2_tokens", "modernbert", "roberta", "phi")

QUICK = ("llama_kv_scales", "whisper")
"""Unusual families of which some are tried each time: kernels that keep addresses; a packed head
that is tied to a plain embedding."""

UNUSUAL_ON_TWO = (
    "phi", "deepseek_v3_mtp", "llama_gptq", "gemma3n", "solar_open", "falcon_h1",
    "llama_kv_scales", "glm4_moe_lite", "granitemoehybrid", "llama_inv_freq", "lfm2_moe",
    "qwen3_tokens", "modernbert", "afmoe",
)  # fmt: skip


def right(row: dict[str, Any], *, followed: bool = False) -> Row:
    return Row(**row).checked(followed=followed)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in FIRST else pytest.mark.slow) for f in FAMILIES]
)
def test_every_tensor_is_written_loaded_or_refused(family: str) -> None:
    right(examine(0, family), followed=family in FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_with_packed_linears_too(family: str) -> None:
    right(examine(0, family, plain=False), followed=family in EXPERTS)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in UNUSUAL
        if name not in CANNOT
    ],
)
def test_unusual_families_are_followed_in_a_stock_engine(family: str) -> None:
    row = right(examine(0, family, plain=False), followed=True)
    assert row.classes.get("unused", 0) == UNUSED.get(family, 0)


@pytest.mark.parametrize(
    ("family", "shared"),
    [
        ("deepseek_v3_mtp", 2),
        pytest.param("glm4_moe_mtp", 2, marks=pytest.mark.slow),
        pytest.param("qwen3_5_mtp", 0, marks=pytest.mark.slow),
    ],
)
def test_heads_that_draft_are_followed_but_for_copies_of_what_they_share(
    family: str, shared: int
) -> None:
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    row = right(examine(0, family, speculative_config=drafts), followed=True)
    assert row.classes.get("unused", 0) == shared


@pytest.mark.parametrize("family", HEADS)
def test_heads_are_followed_beside_plain_linears_too(family: str) -> None:
    right(examine(0, family), followed=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", CANNOT)
def test_families_that_the_engine_itself_cannot_load(family: str) -> None:
    with pytest.raises(AttributeError, match=CANNOT[family]):
        examine(0, family, plain=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_followed_where_nothing_packs_them(family: str) -> None:
    row = right(examine(0, family, plain_experts=True))
    assert not row.refused
    assert row.classes.keys() <= {"in_place", "loaded", "reloaded"}  # a CPU packs convolutions
    assert row.classes["in_place"] >= 0.85 * row.tensors


@pytest.mark.slow
@pytest.mark.parametrize("family", UNUSUAL_ON_TWO)
def test_unusual_families_on_two_ranks(family: str) -> None:
    for (row,) in two_ranks("tests.engines.matrix:examine_two", family):
        right(row, followed=True)


@pytest.mark.parametrize(
    "families",
    [("qwen3", "llama_v500"), pytest.param(TWO, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_two_ranks(families: tuple[str, ...]) -> None:
    for rows in two_ranks("tests.engines.matrix:examine_two", *families, deadline_s=600):
        for row in rows:
            found = right(row)
            assert not found.refused
            assert families == TWO or found.classes == {"in_place": row["tensors"]}


@pytest.mark.parametrize("what", ["experts", "norm", "bias", ""])
def test_weights_that_are_all_alike_are_never_wrong(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = "qwen3_moe" if what == "experts" else "qwen2"
    folder = Path(shutil.copytree(checkpoint(family), tmp_path / family))
    weights = load_file(folder / WEIGHTS_FILE)
    alike = {n: torch.zeros_like(t) if what in n else t for n, t in weights.items()}
    save_file(alike, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    monkeypatch.setattr(matrix, "checkpoint", lambda _: folder)
    for plain in (True, False):
        row = right(examine(0, family, plain=plain))
        assert "refused" not in row.classes or what == "experts"
