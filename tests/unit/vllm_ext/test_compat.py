"""The versions of vLLM that were tested, and the answer to the others."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from deltachain.errors import EngineVersionError
from deltachain_vllm.compat import check_version


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
