"""Servers of families with something that most lack: a head's late bias, heads for later tokens."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltachain.checkpoint import WEIGHTS_FILE
from deltachain.publish import PublishConfig
from deltachain.push import push
from deltachain.store import open_store
from tests.engines.families import named
from tests.engines.load import prompt
from tests.engines.replica import serving
from tests.engines.serving import Generated, Server, start
from tests.engines.trainer import Trainer
from tests.engines.truth import Judge

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def answers(server: Server) -> list[Generated]:
    """What it says to some prompts."""
    dice = random.Random(3)
    return [server.generate(prompt(dice), 24) for _ in range(8)]


def tokens(server: Server) -> list[tuple[int, ...]]:
    """The same, without labels."""
    return [answer.tokens for answer in answers(server)]


def test_a_server_of_phi_serves_what_it_serves_without_us(tmp_path: Path) -> None:
    """vLLM registers the bias of its head while it loads it: that is not there before."""
    with Trainer(tmp_path, family="phi") as trainer, Trainer(tmp_path / "other") as other:
        with start(trainer.base, tmp_path / "alone") as server:
            alone = tokens(server)
        lenient = {"DELTACHAIN_STRICT": "0"}
        folder = tmp_path / "refused"
        with start(trainer.base, folder, other.url, environment=lenient) as server:
            assert server.get("ready").status_code == 503
            assert tokens(server) == alone
        with serving(trainer, tmp_path, plain=False) as replica:
            assert "refused" not in replica.server.status()["classes"]
            assert tokens(replica.server) == alone
            replica.server.update(trainer.step())
            assert replica.goes_on_as(1)


def with_heads(checkpoint: Path, folder: Path, seed: int) -> Path:
    """A checkpoint, and in it the tensors of a head for later tokens, which vLLM does not load."""
    family = named("deepseek_v3_mtp")
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
    url = (tmp_path / "chain").as_uri()
    with Trainer(tmp_path / "trainer", family="deepseek_v3_wide") as trainer:
        trainer.step()
        folders = [with_heads(trainer.pulled(v), tmp_path / str(v), v) for v in (0, 1)]
    for folder in folders:
        push(open_store(url), folder, PublishConfig(url=url))
    with start(folders[0], tmp_path / "server", url) as server:
        kinds = {kind: row["tensors"] for kind, row in server.status()["classes"].items()}
        more = (
            load_file(folders[0] / WEIGHTS_FILE).keys()
            - load_file(trainer.base / WEIGHTS_FILE).keys()
        )
        assert (kinds["unused"], "refused" in kinds) == (len(more), False)
        server.update(1)
        found = answers(server)
        assert {answer.spans for answer in found} == {((0, 24, "1"),)}
        wrong = [
            any(Judge(folder).wrong(a.prompt, a.tokens, range(24)) for a in found)
            for folder in folders
        ]
        assert wrong == [True, False]
        assert server.post("scrub").json()["version"] == 1
