"""Model families in SGLang against the scatter plan: each tensor written, loaded or refused."""

from typing import Final

import pytest

from tests.engines.families import FAMILIES, checkpoint
from tests.engines.matrix import Row, examine, examine_many
from tests.engines.sglang.fresh import load_fresh
from tests.engines.two_ranks import two_ranks
from tests.engines.unusual import UNUSUAL

pytestmark = pytest.mark.engine

FIRST: Final = ("qwen3", "gpt2", "gemma", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""Fused and sharded, transposed, edited by the loader, experts, served in fp32, joined."""

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

KNOWN: Final = [name for name in FAMILIES if name not in UNKNOWN]

STRANGE: Final = {
    "llava": AttributeError,
    "gemma3_seeing": KeyError,
    "modernbert": ValueError,
    "roberta": ValueError,
    "bert": AttributeError,
    "exaone_moe": AttributeError,
    "falcon_mamba": ValueError,
    "flex_olmo": ValueError,
    "glm": ValueError,
    "hunyuan_dense": KeyError,
    "llama_gptq": AttributeError,  # kernels for CPUs, which no registry has
    "llama_int8": AssertionError,
    "llama_kv_scales": AssertionError,  # compressed-tensors asks for CUDA
    "olmo_hybrid": ValueError,
    "zamba2": ValueError,
    "qwen3_5": ValueError,
    "qwen3_5_mtp": ValueError,
}
"""Of the other table: SGLang has no code for them, or reads settings that others have."""

WHOLE: Final = "whisper"
"""SGLang's loader of it takes nothing but the whole checkpoint."""

SEEN: Final = (
    "mimo", "minicpm", "xverse", "orion", "internlm2", "sdar", "gemma2_sequences",
    "qwen2_sequences", "qwen3_sequences", "qwen3_bare", "mistral_bare", "mellum", "dots1",
    "granite_swa", "persimmon", "qwen2_5_vl", "glm4v",
)  # fmt: skip
"""Of those that no other table names: SGLang loads these on a CPU."""

OTHERS: Final = [name for name in UNUSUAL if name not in STRANGE and name != WHOLE]


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in FIRST else pytest.mark.slow) for f in KNOWN]
)
def test_every_tensor_is_written_loaded_or_refused(family: str) -> None:
    Row(**examine(0, family)).checked(followed=True)


@pytest.mark.parametrize(("family", "unused"), [("mimo", 0), ("glm4_moe_mtp", 2)])
def test_heads_that_draft_are_followed_but_for_copies_of_what_they_share(
    family: str, unused: int
) -> None:
    row = Row(**examine(0, family, heads=True))
    row.checked(followed=True)
    assert row.classes.get("unused", 0) == unused


@pytest.mark.slow
@pytest.mark.parametrize("family", [*OTHERS, *SEEN])
def test_tensors_of_unusual_families_are_followed_or_unused(family: str) -> None:
    Row(**examine(0, family)).checked(followed=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "classes"),
    [
        pytest.param(
            "llama4_text", {"in_place": 23, "unused": 4}, id="experts that it never loads"
        ),
        pytest.param("afmoe", {"in_place": 44, "loaded": 1}, id="experts that view one storage"),
        pytest.param("minicpm3", {"repacked": 27}, id="a layer that its loader drops"),
    ],
)
def test_tensors_that_go_another_way(family: str, classes: dict[str, int]) -> None:
    row = Row(**examine(0, family)).checked(followed=True)
    assert row.classes == classes


@pytest.mark.slow
def test_what_is_loaded_whole_or_not_at_all_is_refused() -> None:
    row = Row(**examine(0, WHOLE))
    assert row.wrong == []
    assert row.classes["refused"] == row.tensors - 1
    assert all("KeyError" in reason for reason in row.reasons)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*UNKNOWN, *STRANGE])
def test_what_is_left_out_can_not_be_loaded(family: str) -> None:
    with pytest.raises({**UNKNOWN, **STRANGE}[family]):
        load_fresh(checkpoint(family))


@pytest.mark.parametrize(
    "families",
    [("qwen3", "llama_v500", "qwen3_moe"), pytest.param(TWO, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_two_ranks(families: tuple[str, ...]) -> None:
    for rows in two_ranks("tests.engines.matrix:examine_two", *families, deadline_s=600):
        for row in rows:
            assert Row(**row).checked().classes == {"in_place": row["tensors"]}


@pytest.mark.parametrize(
    ("way", "family"),
    [("pp", "qwen3"), ("ep", "qwen3_moe"), pytest.param("pp", "qwen3_moe", marks=pytest.mark.slow)],
)
def test_stages_and_shards_of_experts(way: str, family: str) -> None:
    for row in two_ranks("tests.engines.matrix:examine_way", way, family):
        assert Row(**row).checked().classes == {"in_place": row["tensors"]}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_thirty_versions_on_one_rank_and_on_two(family: str) -> None:
    """On a CPU without AMX, SGLang cannot generate with latent attention: bits are judged."""
    rows = [examine_many(0, family, 1, 30)]
    rows += two_ranks("tests.engines.matrix:examine_many", family, 2, 30, deadline_s=600)
    for row in rows:
        assert Row(**row).checked(followed=True).alike == []
