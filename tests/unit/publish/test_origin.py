"""Which weights in the folder that a model was loaded from say its wire dtypes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deltachain.errors import ConfigError
from deltachain.publish.model.source import collect_weights
from tests.support.models import plain_model
from tests.unit.publish.test_source import dtypes, folder_of


def state(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    found = plain_model().state_dict().items()
    return {name: torch.randn(one.shape).to(dtype) for name, one in found}


def loaded(tensors: dict[str, Tensor], dtype: torch.dtype, origin: Path) -> nn.Module:
    """Return a model with the values of a file, that names another folder as its origin."""
    model = plain_model(dtype=dtype)
    model.load_state_dict(tensors)
    model.config = SimpleNamespace(_name_or_path=str(origin))  # type: ignore[assignment]
    return model


def test_a_model_of_a_subfolder_has_the_dtypes_of_that_folder(tmp_path: Path) -> None:
    teacher, student = state(1, torch.bfloat16), state(2, torch.float32)
    folder_of(teacher, tmp_path)
    folder_of(student, tmp_path / "student")
    assert set(dtypes(loaded(student, torch.float32, tmp_path)).values()) == {"F32"}
    assert set(dtypes(loaded(teacher, torch.float32, tmp_path)).values()) == {"BF16"}
    folder_of(state(3, torch.bfloat16), tmp_path / "student" / "bf16")
    masters = loaded(state(3, torch.bfloat16), torch.float32, tmp_path)
    assert set(dtypes(masters).values()) == {"BF16"}


def test_a_model_of_a_subfolder_is_not_refused_for_the_dtypes_of_the_root(tmp_path: Path) -> None:
    folder_of(state(1, torch.float32), tmp_path)
    folder_of(state(2, torch.bfloat16), tmp_path / "student")
    trained = loaded(state(3, torch.bfloat16), torch.bfloat16, tmp_path)
    assert set(dtypes(trained).values()) == {"BF16"}


def test_dtypes_are_the_models_where_several_folders_may_be_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder_of(state(1, torch.bfloat16), tmp_path)
    trained = loaded(state(3, torch.float32), torch.float32, tmp_path)
    assert set(dtypes(trained).values()) == {"BF16"}
    folder_of(state(2, torch.bfloat16), tmp_path / "checkpoint-1")
    assert set(dtypes(trained).values()) == {"BF16"}
    assert not caplog.text
    folder_of(state(2, torch.float32), tmp_path / "student")
    assert set(dtypes(trained).values()) == {"F32"}
    assert "several sets of weights that may be the model's" in caplog.text
    assert "dtype='BF16'" in caplog.text


def test_weights_of_another_shape_say_nothing_of_dtypes(tmp_path: Path) -> None:
    wide = {
        name: torch.zeros(*one.shape, 2).bfloat16()
        for name, one in state(1, torch.bfloat16).items()
    }
    folder_of(wide, tmp_path)
    assert set(dtypes(loaded(state(1, torch.float32), torch.float32, tmp_path)).values()) == {"F32"}


def test_a_model_with_other_rows_keeps_the_dtypes_of_its_origin(tmp_path: Path) -> None:
    saved = state(1, torch.bfloat16)
    saved["0.weight"] = torch.zeros(7, saved["0.weight"].shape[1]).bfloat16()
    folder_of(saved, tmp_path)
    model = loaded(state(1, torch.float32), torch.float32, tmp_path)
    assert set(dtypes(model).values()) == {"BF16"}


def test_a_subfolder_with_fewer_layers_is_no_other_models(tmp_path: Path) -> None:
    student = state(1, torch.float32)
    folder_of(state(2, torch.bfloat16) | {"9.weight": torch.zeros(2, 2).bfloat16()}, tmp_path)
    folder_of(student, tmp_path / "student")
    trained = loaded(state(3, torch.float32), torch.float32, tmp_path)
    assert set(dtypes(trained).values()) == {"F32"}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_variant_is_not_refused_for_the_dtypes_of_the_other_weights(
    tmp_path: Path, shards: int
) -> None:
    folder_of(state(1, torch.bfloat16), tmp_path)
    half = {name: one.half() for name, one in state(1, torch.bfloat16).items()}
    if shards == 1:
        save_file(half, tmp_path / "model.fp16.safetensors")
    else:
        for at, name in enumerate(half):
            file = f"model.fp16-{at + 1:05}-of-{len(half):05}.safetensors"
            save_file({name: half[name]}, tmp_path / file)
    assert set(dtypes(loaded(half, torch.float16, tmp_path)).values()) == {"F16"}
    trained = loaded(state(3, torch.float16), torch.float16, tmp_path)
    assert set(dtypes(trained).values()) == {"F16"}


def test_a_dtype_that_no_set_of_weights_has_is_refused(tmp_path: Path) -> None:
    folder_of(state(1, torch.bfloat16), tmp_path)
    save_file(state(1, torch.float32), tmp_path / "model.fp32.safetensors")
    with pytest.raises(ConfigError, match="F16 in the model and BF16 in its checkpoint"):
        collect_weights(loaded(state(1, torch.float16), torch.float16, tmp_path))


def test_a_resumed_run_keeps_the_dtypes_of_its_folder(tmp_path: Path) -> None:
    folder_of(state(1, torch.bfloat16), tmp_path)
    masters = state(2, torch.float32)
    folder_of(masters, tmp_path / "checkpoint-500")
    assert set(dtypes(loaded(masters, torch.float32, tmp_path)).values()) == {"BF16"}
