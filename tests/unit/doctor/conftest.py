"""A chain to examine, in an environment of its own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.support import ok as run
from tests.unit.cli.support import random_state, write_checkpoint


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing of this machine's, and everything put back."""
    foreign = ("DELTACHAIN_", "AWS_", "HF_", "SSL_", "VLLM_", "SGLANG_", "HTTP", "ALL_PROXY")
    for name in list(os.environ):
        if name.upper().startswith(foreign):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # and no ~/.aws
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chain")
    run("push", write_checkpoint(root / "weights", random_state()), root / "chain", "--step", 400)
    return root / "chain"
