"""The versions of vLLM that were tested, and the answer to the others."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from deltachain.errors import ConfigError, EngineVersionError
from deltachain_vllm.compat import check_counts, check_experts, check_version


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.9rc1", "0.33.0"])
def test_tested_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    assert check_version() == version


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "dev"])
def test_other_versions_are_refused_with_the_range(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    with pytest.raises(EngineVersionError, match=r"0\.32 up to, not including, 0\.34"):
        check_version()


def test_several_engines_and_front_ends_are_refused_by_their_options() -> None:
    check_counts(1, 1)
    with pytest.raises(ConfigError, match="2 data-parallel engines"):
        check_counts(2, 2)
    with pytest.raises(ConfigError, match="3 front ends") as caught:
        check_counts(1, 3)
    assert "--api-server-count 1" in caught.value.hint


@pytest.mark.parametrize(
    ("spread", "ranks", "experts", "refused"),
    [
        (True, 2, True, True),
        (True, 1, True, False),
        (True, 2, False, False),
        (False, 2, True, False),
    ],
)
def test_experts_on_some_ranks_are_refused_by_the_option(
    *, spread: bool, ranks: int, experts: bool, refused: bool
) -> None:
    parallel = SimpleNamespace(enable_expert_parallel=spread, tensor_parallel_size=ranks)
    config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(is_moe=experts))
    if not refused:
        check_experts(config)
        return
    with pytest.raises(ConfigError, match="--enable-expert-parallel"):
        check_experts(config)
