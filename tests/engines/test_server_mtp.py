"""A checkpoint with heads for later tokens, which engines do not load, is followed and served."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltachain.checkpoint import WEIGHTS_FILE
from deltachain.publish import PublishConfig
from deltachain.publish.push import push
from deltachain.store import open_store
from tests.engines.expected import Judge
from tests.engines.families import named
from tests.engines.load import prompt
from tests.engines.serving import ENGINE, start
from tests.engines.trainer import Trainer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PLAIN: Final = {"vllm": "deepseek_v3_wide", "sglang": "glm4_moe"}
WITH_HEADS: Final = {"vllm": "deepseek_v3_mtp", "sglang": "glm4_moe_mtp"}
"""Families that the engine can generate with on a CPU, without such heads and with them."""


def with_heads(checkpoint: Path, folder: Path, seed: int) -> Path:
    family = named(WITH_HEADS[ENGINE])
    assert family.edit is not None
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(family.said)))
    saved = load_file(folder / WEIGHTS_FILE)
    made = family.edit(saved)
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(made.keys() - saved.keys()):
        made[name] = torch.randn(made[name].shape, generator=generator).to(made[name].dtype)
    save_file(made, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folder


def test_a_checkpoint_with_heads_for_later_tokens_is_followed(tmp_path: Path) -> None:
    url, dice = (tmp_path / "chain").as_uri(), random.Random(3)
    with Trainer(tmp_path / "trainer", family=PLAIN[ENGINE]) as trainer:
        trainer.step()
        folders = [with_heads(trainer.pulled(v), tmp_path / str(v), v) for v in (0, 1)]
    for folder in folders:
        push(open_store(url), folder, PublishConfig(url=url))
    with start(folders[0], tmp_path / "server", url) as server:
        kinds = {kind: row["tensors"] for kind, row in server.status()["classes"].items()}
        saved, plain = (load_file(one / WEIGHTS_FILE) for one in (folders[0], trainer.base))
        heads = saved.keys() - plain.keys()
        assert heads
        assert (kinds["unused"], "refused" in kinds) == (len(heads), False)
        server.update(1)
        answers = [server.generate(prompt(dice), 24) for _ in range(8)]
        assert {answer.spans for answer in answers} == {((0, 24, "1"),)}
        wrong = [
            any(Judge(folder).wrong(a.prompt, a.tokens, range(24)) for a in answers)
            for folder in folders
        ]
        assert wrong == [True, False]
        assert server.post("scrub").json()["version"] == 1
