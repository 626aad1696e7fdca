"""Anchors in safetensors: stock libraries load the store, and everybody follows from them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from deltachain.chain.chain import Chain
from deltachain.errors import ConfigError, UnsupportedModelError
from deltachain.maintain.added_edges import add_anchor
from deltachain.publish import PublishConfig, Publisher, session
from deltachain.publish.model.layout import Box, ElementMap
from deltachain.publish.model.source import ModelTensors, Weight
from deltachain.publish.open_anchors import OF_PARTS, refuse_parts
from deltachain.store import open_store
from deltachain.subscribe import Subscriber
from deltachain.types import TensorSpec
from examples.demo.model import make_model
from tests.support.models import State, bits_of, recompute, same, train_
from tests.support.values import present
from tests.unit.cli.support import ok, read_checkpoint


def opened(chain: Path) -> State:
    """The bits in the store's newest anchor, by safetensors alone."""
    found: dict[str, Tensor] = {}
    newest = max((chain / "anchors").iterdir())
    for part in newest.iterdir():
        with safe_open(part, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if name not in OF_PARTS}  # noqa: SIM118
    return bits_of(found)


def test_stock_libraries_load_the_store_and_all_readers_follow_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "anchor_part_nbytes", lambda *_: 1 << 16)
    chain, model = tmp_path / "chain", make_model(0).bfloat16()
    with torch.no_grad():  # -0.0 and NaN with a payload
        model.model.norm.weight.view(torch.int16)[:3] = torch.tensor([-32768, 0x7FC5, -58])
    config = PublishConfig(url=str(chain), anchor_every=2, anchor_format="safetensors")
    with Publisher(config).attach(model) as publisher:
        states = {0: bits_of(model)}
        for step in range(1, 5):
            train_(model, step)
            publisher.publish(step=step).result()
            publisher.flush()
            states[step] = bits_of(model)
            anchor = step // 2 * 2
            assert same(opened(chain), states[anchor])
    load: Any = AutoModelForCausalLM.from_pretrained
    loaded, said = load(chain, output_loading_info=True)
    assert not said["missing_keys"]
    assert {*said["unexpected_keys"]} <= OF_PARTS
    assert same(bits_of(loaded), states[4])
    assert {v for v, found in recompute(open_store(str(chain))).items() if found.anchored} >= {2, 4}

    tensors = {name: torch.zeros_like(one) for name, one in model.state_dict().items()}
    with Subscriber(str(chain), tensors) as subscriber:
        assert present(subscriber.update()).plan.startswith("nothing to 4: anchor->4 ")
    assert same(bits_of(tensors), states[4])
    assert ok("verify", chain, "--json").document["last"] == 4
    add_anchor(Chain.open(open_store(str(chain))), Chain.open(open_store(str(chain))).read(3))
    ok("mirror", chain, tmp_path / "mirror")
    for store in (chain, tmp_path / "mirror"):
        ok("pull", store, "--out", tmp_path / "out", "--version", 3)
        assert same(read_checkpoint(tmp_path / "out"), states[3])
        shutil.rmtree(tmp_path / "out")


def test_parts_of_tensors_and_maintenance_are_refused_by_name() -> None:
    spec = TensorSpec("w", "BF16", (4, 2))
    half = ElementMap.straight(spec, Box((4, 2), (0, 0), (2, 2)))
    weight = Weight(spec, torch.zeros(2, 2), frozen=False, element_map=half)
    source = ModelTensors((weight,), (spec,), {}, lambda: ())
    with pytest.raises(UnsupportedModelError, match="'w': this rank holds a part of it"):
        refuse_parts(source)
    with pytest.raises(ConfigError, match="exclude each other"):
        PublishConfig(url="memory://x", maintain=True, anchor_format="safetensors")
