"""Heads that stock vLLM ties because they equal the embedding when it loads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltachain.checkpoint import WEIGHTS_FILE, Checkpoint
from deltachain.delta import TensorDelta, changes
from deltachain.errors import TensorMismatchError
from deltachain.replica.rank import Rank
from tests.engines.compare import copied, live
from tests.engines.families import checkpoint
from tests.engines.matrix import attached
from tests.engines.vllm.fresh import known, load_fresh, load_in_context
from tests.support.spools import spool_of

pytestmark = pytest.mark.engine

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def saved(folder: Path, weights: Mapping[str, Tensor]) -> Path:
    shutil.copytree(checkpoint("llama"), folder)
    save_file(dict(weights), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return folder


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_a_version_that_parts_a_head_from_the_embedding_is_refused(
    implementation: str, tmp_path: Path
) -> None:
    weights = load_file(checkpoint("llama") / WEIGHTS_FILE)
    embedding = weights[EMBEDDING]
    before = saved(tmp_path / "before", {**weights, HEAD: embedding.clone()})
    new = torch.where(torch.rand(embedding.shape) < 0.1, embedding + 1, embedding)
    alike = saved(tmp_path / "alike", {**weights, EMBEDDING: new, HEAD: new.clone()})
    head, both = (saved(tmp_path / name, one) for name, one in {
        "head": {**weights, EMBEDDING: embedding, HEAD: new},
        "both": {**weights, EMBEDDING: new, HEAD: new + 1},
    }.items())  # fmt: skip
    more: dict[str, Any] = {"model_impl": implementation}
    with load_in_context(before, **more) as (config, model):
        specs = dict(Checkpoint(before).specs)
        rank = Rank(known(config, model), specs.values(), {})
        attached(rank, specs, 0, 1)
        at_first = copied(live(model))
        assert model.get_parameter(HEAD) is model.get_parameter(EMBEDDING)
        for ticket, parted in enumerate((head, both)):
            with pytest.raises(TensorMismatchError, match="keeps them as one"):
                staged(rank, ticket, before, parted, tmp_path)
        assert not rank.staged
        assert all(torch.equal(at_first[name], t) for name, t in copied(live(model)).items())
        staged(rank, 3, before, alike, tmp_path)
        rank.swap(3, 1, back=False)
        now = copied(live(model))
    fresh = copied(live(load_fresh(alike))) if implementation == "auto" else {EMBEDDING: new}
    assert all(torch.equal(now[name], tensor) for name, tensor in fresh.items())


def staged(rank: Rank, ticket: int, before: Path, after: Path, folder: Path) -> None:
    old, new = Checkpoint(before), Checkpoint(after)
    found = [changes(spec, old.bits(name), new.bits(name)) for name, spec in old.specs.items()]
    deltas: list[TensorDelta] = [delta for delta in found if delta.nnz]
    spool = spool_of(folder / f"spool {ticket}", deltas)
    rank.stage(ticket, spool.folder, 1 << 30)
