"""What the READMEs tell people to type: each ``hf`` command is held against the client's help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
ROLLOUT: Final = ROOT / "spaces" / "rollout"

VARIABLE: Final = re.compile(r"\$\{?([A-Z][A-Z_]+)\b")


def test_every_variable_is_in_the_table() -> None:
    texts = [(ROLLOUT / name).read_text("utf-8") for name in ("entrypoint.sh", "Dockerfile")]
    _, _, table = (ROLLOUT / "README.md").read_text(encoding="utf-8").partition("## Settings")
    # Bash's own, those that are set here, and vLLM's and SGLang's, which are only added to.
    others = {"HOME", "SECONDS", "DELTACHAIN_BASE", "VLLM_PLUGINS", "SGLANG_PLUGINS"}
    used = {name for text in texts for name in VARIABLE.findall(text)} - others
    documented = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", table))
    assert used == {name for name in documented if not name.startswith("AWS_")} - {
        "DELTACHAIN_PAUSE",
        "DELTACHAIN_POLL_S",
    }
    assert used
