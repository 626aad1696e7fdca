"""Settings with values of another type than their field."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltachain.errors import ConfigError
from deltachain.maintain import KeepRule
from deltachain.publish import PublishConfig
from deltachain.publish.quantise.settings import Quantization
from deltachain.subscribe import SubscribeConfig

Maker = Callable[..., Any]

URL = "memory://unused"
PUBLISH: Maker = partial(PublishConfig, url=URL)


EXPECTED = "Expected .*, got `Unknown`|expected one of '"


class Unknown:
    """Of no type that a setting has."""


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (make, field.name)
        for make, settings in (
            (PublishConfig, PublishConfig),
            (SubscribeConfig, SubscribeConfig),
            (KeepRule, KeepRule),
            (partial(Quantization, "fp8-block"), Quantization),
        )
        for field in fields(settings)
        if field.name != "recipe"
    ],
)
def test_a_value_of_another_type_names_field_expected_and_found(make: Maker, name: str) -> None:
    url = {"url": URL} if make in (PublishConfig, SubscribeConfig) else {}
    with pytest.raises(ConfigError, match=rf"{name}=.*: ({EXPECTED})") as caught:
        make(**(url | {name: Unknown()}))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"anchor_every": "5"}, r"anchor_every='5': Expected `int \| null`, got `str`"),
        ({"anchor_every": 2.5}, r"Expected `int \| null`, got `float`"),
        ({"anchor_every": True}, r"Expected `int \| null`, got `bool`"),
        ({"deadline_s": "300"}, "deadline_s='300': Expected `float`, got `str`"),
        ({"encoding": 5}, "encoding=5: Expected `str`"),
        ({"encoding": None}, "encoding=None: Expected `str`"),
        ({"metadata": [("run", "b")]}, "metadata=.*Expected `object`, got `array`"),
        ({"maintain": 5}, "maintain=5: Expected `bool"),
        ({"metrics": 9095}, "metrics=9095: Expected `str"),
        ({"when_busy": "later"}, "when_busy='later': expected one of 'cover', 'wait'"),
        ({"anchor_factor": float("nan")}, "anchor_factor=nan: Expected `float` > 0"),
    ],
)
def test_settings_of_a_publisher(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PUBLISH(**settings)
    assert caught.value.hint


def test_a_text_is_no_list_of_layers() -> None:
    with pytest.raises(ConfigError, match="ignore='lm_head': Expected `array`"):
        Quantization("fp8-block", ignore="lm_head")  # type: ignore[arg-type]
    assert Quantization("fp8-block", ignore=["a"]).ignore == ("a",)  # type: ignore[arg-type]


def test_paths_and_numbers_of_other_libraries_are_taken(tmp_path: Path) -> None:
    config = PUBLISH(base=str(tmp_path), anchor_every=np.int64(5), deadline_s=np.float32(2))
    assert (config.base, config.anchor_every, config.deadline_s) == (tmp_path, 5, 2.0)
    assert PublishConfig(url=tmp_path).url == str(tmp_path)  # type: ignore[arg-type]
    assert SubscribeConfig(url=tmp_path, poll_s=5).url == str(tmp_path)  # type: ignore[arg-type]


def test_a_torch_dtype_is_a_wire_dtype() -> None:
    assert PUBLISH(dtype=torch.bfloat16).dtype == "BF16"
    assert PUBLISH(dtype=torch.float8_e4m3fn).dtype == "F8_E4M3"
    assert PUBLISH(dtype="model").dtype == "model"


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", "I8", torch.int8, torch.float8_e4m3fnuz])
def test_a_dtype_that_is_no_wire_dtype_says_what_to_write(dtype: object) -> None:
    with pytest.raises(ConfigError, match=r"dtype=.*: expected one of .*BF16") as caught:
        PUBLISH(dtype=dtype)
    assert "torch.bfloat16" in caught.value.hint


def test_settings_of_another_class_are_refused() -> None:
    with pytest.raises(ConfigError, match="config is a dict, expected a PublishConfig") as caught:
        PublishConfig.at("memory://unused", {"encoding": "raw"})  # type: ignore[arg-type]
    assert caught.value.hint
