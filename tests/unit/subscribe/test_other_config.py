"""A follower whose module computes something else than the chain's configuration says is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.assets import collect_assets
from deltachain.subscribe import Subscriber
from tests.unit.publish.library import llama

OTHERS: dict[str, dict[str, Any]] = {
    "hidden_act": {"hidden_act": "gelu"},
    "rms_norm_eps": {"rms_norm_eps": 0.5},
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    model, config = llama(), PublishConfig(url=str(tmp_path / "chain"))
    with Publisher(config) as publisher:
        publisher.attach(model, assets=collect_assets(model, config), alone=True)
    return config.url


def follower(**other: object) -> nn.Module:
    fields: dict[str, Any] = {**llama().config.to_dict(), **other}
    return LlamaForCausalLM(LlamaConfig(**fields)).bfloat16()


@pytest.mark.parametrize("field", OTHERS)
def test_a_field_that_decides_the_outputs_is_named_with_both_values(
    url: str, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    Subscriber(url, follower(**OTHERS[field])).update()
    (line,) = [line for line in caplog.messages if "configuration" in line]
    for value in (OTHERS[field][field], llama().config.to_dict()[field]):
        assert repr(value) in line
    assert field in line
    assert line.count(", there ") == 1


def test_fields_of_a_run_are_no_difference(url: str, caplog: pytest.LogCaptureFixture) -> None:
    module = follower(use_cache=False, attention_dropout=0.5, eos_token_id=7, id2label={0: "x"})
    Subscriber(url, module).update()
    assert "configuration" not in caplog.text
