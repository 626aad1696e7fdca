"""DeepSpeed, megatron-core and verl, in environments of their own: their pins exclude ours."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from deltachain.chain.chain import Chain
from deltachain.cli.pull import pull
from deltachain.errors import UnsupportedModelError
from deltachain.integrations.megatron import shards
from deltachain.publish import Publisher
from deltachain.store import open_store
from deltachain.verify import verify
from tests.ranks.trials import compare

ROOT: Final = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.dist


def case(trial: str, ranks: int, how: str, *marks: Any) -> Any:
    venv = "verl" if trial.startswith("verl") else "trainers"
    return pytest.param(venv, trial, ranks, how, marks=[pytest.mark.venv(venv), *marks])


@pytest.mark.parametrize(
    ("venv", "trial", "ranks", "how"),
    [
        case("deepspeed_trials:zero", 4, "3"),
        *(
            case("deepspeed_trials:zero", 2, how, pytest.mark.slow)
            for how in ("3 persistent", "2", "1")
        ),
        case("deepspeed_trials:pipeline", 2, "2", pytest.mark.slow),
        case("megatron_trials:megatron", 4, "qwen3 TP2 PP2 VPP2"),
        case("megatron_trials:megatron", 4, "qwen3_moe PP2 EP2 grouped"),
        *(
            case("megatron_trials:megatron", 4, how, pytest.mark.slow)
            for how in (
                "qwen3 TP4 KV1 tied",
                "llama TP2 PP2 tied",
                "qwen2_moe TP2 EP2 drawn",
                "qwen3_moe TP2 EP2 ETP1 drawn",
                "deepseek_v3 TP2 EP2 drawn",
            )
        ),
        case("verl_trials:megatron", 2, "TP2"),
        case("verl_trials:fsdp2", 2, "FSDP2"),
    ],
)
def test_every_version_is_the_export_of_the_framework(
    tmp_path: Path, venv: str, trial: str, ranks: int, how: str
) -> None:
    url = (tmp_path / "chain").as_uri()
    done = subprocess.run(
        [
            ROOT / f".venv-{venv}" / "bin" / "python",
            "-m",
            "tests.ranks.spawn",
            f"tests.ranks.{trial}",
            str(ranks),
            how,
            url,
            tmp_path,
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    chain = Chain.open(open_store(url))
    assert [proof.version for proof in verify(chain)][:11] == list(range(11))


class Bridge:
    """What is read of a bridge of mbridge, of a rank that has half of each expert."""

    mpu = SimpleNamespace(tp_rank=0, tp_size=1, etp_rank=0, etp_size=2)

    def _weight_name_mapping_mcore_local_to_global(self, _: nn.Module) -> dict[str, str]:
        return {
            "head.weight": "output_layer.weight",
            "expert.weight": "decoder.layers.0.mlp.experts.linear_fc1.weight0",
        }

    def _weight_merge_across_tp(self, name: str, *_: object) -> Tensor:
        raise AssertionError(name)

    def _weight_to_hf_format(self, _: str, weight: Tensor) -> tuple[list[str], list[Tensor]]:
        return ["lm_head.weight", "mtp.head.weight"], [weight[:3]] * 2


def _model(name: str) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(2, 4, bias=False, dtype=torch.bfloat16)})


def test_a_weight_that_a_bridge_saves_twice_has_both_names(tmp_path: Path) -> None:
    url, model = (tmp_path / "chain").as_uri(), _model("head")
    with Publisher(url).attach(shards(Bridge(), [model])) as publisher:
        model.head = _model("head").head  # another parameter, as after loading
        publisher.publish(step=1).result(60)
    pull(url, out=tmp_path / "pulled")
    saved = model.get_parameter("head.weight").detach()[:3].clone()
    compare(tmp_path / "pulled", {"lm_head.weight": saved, "mtp.head.weight": saved})


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("expert", "does not export .* of 2 parts", "expert_tensor_parallel_size"),
        ("other", r"divides 'other.weight' in a way of its own", "use_distributed_optimizer"),
    ],
)
def test_a_weight_that_a_bridge_does_not_know_is_refused(
    tmp_path: Path, name: str, message: str, hint: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        Publisher(tmp_path.as_uri()).attach(shards(Bridge(), [_model(name)]))
    assert hint in caught.value.hint


def test_fsdp_of_a_model_of_megatron_is_refused() -> None:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = _model("head")
        fully_shard(model.get_submodule("head"), mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedModelError, match=r"divides 'head.weight'") as caught:
            shards(Bridge(), [model])
    finally:
        distributed.destroy_process_group()
    assert "instead of FSDP of torch or Megatron" in caught.value.hint


def test_weights_that_ranks_get_later_are_refused() -> None:
    model = _model("head")
    vars(model)["ddp_config"] = SimpleNamespace(overlap_param_gather=True)
    with pytest.raises(UnsupportedModelError, match="overlap_param_gather"):
        shards(Bridge(), [nn.ModuleList([model])])  # in a wrapper


def test_a_bridge_of_another_library_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="expected a bridge of mbridge") as caught:
        shards(object(), [])
    assert "publish whole tensors" in caught.value.hint
