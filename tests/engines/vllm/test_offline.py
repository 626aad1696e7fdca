"""Chains that were trained for real, followed inside vLLM: every version exact, and back again."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltachain.checkpoint import WEIGHTS_FILE
from deltachain.errors import ConfigError
from deltachain.publish import PublishConfig
from deltachain.publish.push import push
from deltachain.store import open_store
from tests.engines.families import make
from tests.engines.serving import said_by
from tests.engines.trainer import NAMES, train
from tests.engines.vllm.fresh import packs_linears

pytestmark = pytest.mark.engine

VERSIONS = 20
RATE = 1e-2
"""Far more than a real one: tokens must tell a version from the one before."""


def follow(family: str, folder: Path, *options: str) -> dict[str, Any]:
    # In a process of its own: vLLM decorates classes of transformers where it is imported.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        chain = pool.submit(train, family, folder, VERSIONS, rate=RATE).result()
    return run(chain.url, chain.base, *options)


def run(url: str, base: Path, *options: str) -> dict[str, Any]:
    return said_by("tests.engines.vllm.offline", url, str(base), *options)


def check(seen: dict[str, Any], ranks: int) -> None:
    assert seen["held"] == 0
    assert seen["wrong"] == {str(v): [[]] * ranks for v in range(1, VERSIONS + 1)}
    assert seen["named"] == {str(v): str(v) for v in range(1, VERSIONS + 1)}
    assert seen["back"] == {str(v): [[]] * ranks for v in (VERSIONS - 1, VERSIONS - 2, 0)}
    assert seen["scrubbed"] == [True] * 3
    assert "one thread at a time" in seen["refused"]


# The others take the way of qwen3, which two ranks take below; test_matrix.py loads them too.
@pytest.mark.parametrize(
    "family", [n if n == "gemma3" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_a_trained_chain_is_followed_exactly_and_back(family: str, tmp_path: Path) -> None:
    seen = follow(family, tmp_path)
    check(seen, 1)
    assert set(seen["classes"]) == {"in_place"}
    check_tokens(seen)


def check_tokens(seen: dict[str, Any]) -> None:
    assert seen["unlike"] == {str(v): [] for v in range(1, VERSIONS + 1)}
    noticed = sum(map(bool, seen["stale"].values()))
    assert noticed >= 0.75 * VERSIONS, seen["stale"]


def test_linears_of_a_stock_engine_are_exact(tmp_path: Path) -> None:
    """Where they are packed, nothing but tokens can be seen of what it computes from."""
    seen = follow("qwen3", tmp_path, "--stock")
    if packs_linears():
        assert seen["classes"]["reloaded"] >= 16
    else:
        assert set(seen["classes"]) == {"in_place"}
    check_tokens(seen)
    assert seen["scrubbed"] == [True] * 3


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_two_ranks_follow_exactly_and_back(family: str, tmp_path: Path) -> None:
    check(follow(family, tmp_path, "--tp", "2"), 2)


@pytest.mark.parametrize(
    ("family", "options", "ranks"),
    [
        ("qwen3", ("--pp", "2"), 2),
        ("qwen3_moe", ("--tp", "2", "--ep"), 2),
        pytest.param("qwen3", ("--pp", "2", "--tp", "2"), 4, marks=pytest.mark.slow),
        pytest.param("qwen3", ("--pp", "2", "--stock"), 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", ("--tp", "2", "--ep", "--stock"), 2, marks=pytest.mark.slow),
    ],
)
def test_stages_and_shards_of_experts_follow_exactly_and_back(
    family: str, options: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    seen = follow(family, tmp_path, *options)
    if "--stock" in options:
        assert "reloaded" in seen["classes"]
    else:
        check(seen, ranks)
        assert set(seen["classes"]) == {"in_place"}
    if ranks == 2:
        check_tokens(seen)


@pytest.mark.slow
def test_names_of_a_model_that_takes_adapters(tmp_path: Path) -> None:
    seen = follow("qwen3", tmp_path, "--lora")
    assert set(seen["classes"]) == {"in_place"}
    check_tokens(seen)
    assert seen["scrubbed"] == [True] * 3


def test_experts_that_are_all_alike_are_refused_by_name(tmp_path: Path) -> None:
    """Packed zeros do not show where the packing puts each of them."""
    base = make("qwen3_moe", tmp_path / "base")
    after = make("qwen3_moe", tmp_path / "after")
    weights = load_file(base / WEIGHTS_FILE)
    alike = {n: torch.zeros_like(t) if "experts" in n else t for n, t in weights.items()}
    save_file(alike, base / WEIGHTS_FILE, {"format": "pt"})
    save_file({n: -t for n, t in alike.items()}, after / WEIGHTS_FILE, {"format": "pt"})
    url = (tmp_path / "chain").as_uri()
    for folder in (base, after):
        push(open_store(url), folder, PublishConfig(url=url))
    seen = run(url, base, "--attach")
    assert (
        "TensorMismatchError: 24 of 45 tensors have no proven way into this engine"
        in seen["refusal"]
    )
    assert "experts" in seen["refusal"]
    assert seen["same"]


@pytest.mark.parametrize("named", ["deltachain_vllm.WorkerExtension", f"{__name__}.Mine", ""])
def test_an_extension_that_is_not_a_subclass_of_ours_is_refused_with_the_way(named: str) -> None:
    from deltachain_vllm.extension import check_extension  # noqa: PLC0415 - needs vLLM

    parallel = SimpleNamespace(worker_extension_cls=named)
    config = SimpleNamespace(parallel_config=parallel)
    if "deltachain_vllm" in named:
        check_extension(config, "--worker-extension-cls")
        return
    with pytest.raises(ConfigError, match="extension") as caught:
        check_extension(config, "--worker-extension-cls")
    assert "a subclass of" in caught.value.hint
    assert "deltachain_vllm.WorkerExtension" in caught.value.hint
    assert "--worker-extension-cls" in caught.value.hint


class Mine:
    pass
