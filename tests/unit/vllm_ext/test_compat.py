"""The versions of vLLM that were tested, and the answer to the others."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from deltachain.errors import EngineVersionError
from deltachain_vllm.compat import DERIVED, check_version


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.9rc1"])
def test_tested_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    assert check_version() == version


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "dev"])
def test_other_versions_are_refused_with_the_range(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    with pytest.raises(EngineVersionError, match=r"0\.32 up to, not including, 0\.33"):
        check_version()


@pytest.mark.parametrize(
    ("name", "derived"),
    [
        ("model.rotary_emb.cos_sin_cache", True),
        ("model.rotary_emb.original_inv_freq", True),
        ("model.layers.0.self_attn.attn._k_scale", True),
        ("model.layers.0.self_attn.qkv_proj.lora_a_stacked", True),
        ("model.layers.0.self_attn.qkv_proj.weight", False),
        ("model.layers.0.self_attn.k_norm.weight", False),
        ("model.layers.0.mixer.A", False),
    ],
)
def test_what_vllm_makes_itself(name: str, derived: bool) -> None:
    assert bool(DERIVED.search(name)) is derived
