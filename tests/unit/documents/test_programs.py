"""Every Python block of every document runs, with nothing replaced but places and models' names."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import deltachain
from deltachain import Chain, open_store
from examples.demo.model import make_tokenizer, save_checkpoint
from tests.support.models import bits_of, same
from tests.support.values import eventually, present
from tests.unit.control.replicas import app_of, followed, leader_of, served
from tests.unit.documents.blocks import ROOT, blocks, commands

if TYPE_CHECKING:
    from tests.support.hub.server import HubServer
    from tests.support.seaweed import Seaweed

PROGRAMS: Final = {str(block): block for block in blocks("python")}

ENGINE: Final = {
    "docs/frameworks.md:2": "tests/engines/vllm/test_trainer.py",
    "docs/frameworks.md:3": "tests/engines/vllm/ray_actor.py",
    "docs/frameworks.md:4": "examples/14_areal.py",
    "vllm_ext/README.md:0": "tests/engines/vllm/offline.py",
    "vllm_ext/README.md:1": "tests/engines/vllm/async_offline.py",
    "sglang_ext/README.md:0": "tests/engines/sglang/offline.py",
    "spaces/environment/README.md:0": "tests/unit/spaces/openenv_player.py",
}
"""Blocks that need an environment of their own, and what runs the same calls in one."""

BASE: Final = "Qwen/Qwen3-0.6B"
HIDDEN: Final = 32

Namespace = dict[str, Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=512,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
        )
    )
    save_checkpoint(model, make_tokenizer(["the small crow"]), folder)
    return folder


@pytest.fixture
def run(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Namespace, Path]]:
    monkeypatch.chdir(tmp_path)
    url = tmp_path / "policy-chain"

    def running(name: str, replaced: dict[str, str] | None = None, **given: Any) -> Any:
        text = PROGRAMS[name].text
        places = {
            BASE: str(base),
            "/mnt/policy": str(url),
            "s3://policies/run-1": str(url),
            **(replaced or {}),
        }
        for old, new in places.items():
            text = text.replace(old, new)
        namespace: Namespace = {"__name__": "__main__", "deltachain": deltachain, **given}
        exec(compile(text, name, "exec"), namespace)  # noqa: S102 - our own documents
        return namespace, url

    return running


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).bfloat16()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def receipt_of(url: Path) -> Any:
    """What a folder that follows a chain says of its newest version."""
    with deltachain.Subscriber(str(url), str(url.parent / "replica")) as replica:
        return present(replica.update())


def check(url: str | Path, model: nn.Module, *, step: int | None) -> None:
    with TemporaryDirectory() as folder, deltachain.Subscriber(str(url), folder) as subscriber:
        assert present(subscriber.update()).step == step
        found = load_file(Path(folder) / "model.safetensors")
    truth = model.state_dict()
    assert len(found) >= 4
    assert all(tensor.equal(truth[name].to(tensor.dtype)) for name, tensor in found.items())


def test_quickstart_of_a_folder(run: Any) -> None:
    namespace, url = run("docs/quickstart-folder.md:0")
    check(url, namespace["model"], step=10)
    namespace, _ = run("docs/quickstart-folder.md:1")
    assert namespace["subscriber"].version == 0
    assert Path("policy/model.safetensors").exists()


@pytest.mark.full
def test_quickstart_of_s3(run: Any, seaweed: "Seaweed", monkeypatch: pytest.MonkeyPatch) -> None:
    options = seaweed.options
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    made = {c.words for c in commands() if c.words[:2] == ("python", "-c")}
    assert len(made) == 1  # the bucket, in each document that has it
    subprocess.run([sys.executable, *made.pop()[1:]], check=True, timeout=60)
    url = "s3://policies/run-1"
    namespace, _ = run("docs/quickstart-folder.md:0", {"/mnt/policy": url, url: url})
    check(url, namespace["model"], step=10)


@pytest.mark.full
def test_quickstart_of_a_bucket_of_the_hub(
    run: Any, hub: "HubServer", bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    url = f"hf://buckets/{bucket}/run-1"
    namespace, _ = run("docs/quickstart-folder.md:0", {"/mnt/policy": url})
    check(url, namespace["model"], step=10)


@pytest.mark.slow
def test_trl(run: Any) -> None:
    small = (
        'GRPOConfig(use_cpu=True, bf16=False, max_steps=2, learning_rate=1e-3, report_to="none",'
        " per_device_train_batch_size=2, num_generations=2, max_completion_length=4,"
        ' logging_steps=1, save_strategy="no", disable_tqdm=True, '
    )
    namespace, url = run("docs/trainers.md:0", {"GRPOConfig(out": f"{small}out"})
    trainer = namespace["trainer"]
    check(url, trainer.model, step=2)
    reported = {name for line in trainer.state.log_history for name in line}
    assert "deltachain/version" in reported


@pytest.mark.full
def test_trainer_of_transformers(run: Any) -> None:
    small = (
        'TrainingArguments(use_cpu=True, report_to="none", learning_rate=1e-3, disable_tqdm=True,'
        ' save_strategy="no", '
    )
    namespace, url = run("docs/trainers.md:1", {"TrainingArguments(out": f"{small}out"})
    check(url, namespace["trainer"].model, step=3)
    history = namespace["trainer"].state.log_history
    assert "deltachain/version" in {name for line in history for name in line}


def test_accelerate(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    namespace, url = run("docs/trainers.md:2")
    check(url, namespace["model"], step=3)


def test_any_optimizer(run: Any) -> None:
    namespace, url = run("docs/trainers.md:3")
    check(url, namespace["model"], step=5)


def test_quantised_chain(run: Any, base: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    optimizer = sgd(model)
    namespace, url = run("docs/quantization.md:0", model=model, optimizer=optimizer)
    for _ in range(3):
        model(torch.ones(2, 8, dtype=torch.long)).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    namespace["attachment"].detach()
    assert receipt_of(url).step == 3
    found = load_file(url.parent / "replica" / "model.safetensors")
    assert {one.dtype for name, one in found.items() if "_proj.weight" in name} == {
        torch.float8_e4m3fn,
        torch.float32,
    }


@pytest.mark.full
def test_fsdp2(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.demo.online.processes import free_port  # noqa: PLC0415

    one = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in one.items():
        monkeypatch.setenv(name, str(value))
    namespace, url = run(
        "docs/sharded-trainers.md:0", {"init_process_group()": 'init_process_group("gloo")'}
    )
    receipt = receipt_of(url)
    assert receipt.step == 2
    assert namespace["publisher"].version == receipt.version


def test_the_first_line_of_the_readme_reports(run: Any) -> None:
    added: list[Any] = []
    logged: list[Any] = []
    handler = SimpleNamespace(callbacks=[])
    trainer = SimpleNamespace(
        add_callback=added.append, log=logged.append, callback_handler=handler
    )
    run("README.md:0", trainer=trainer)
    (callback,) = added
    assert isinstance(callback, deltachain.DeltaChainCallback)
    now: Any = SimpleNamespace(logging_steps=1, global_step=1)
    callback._log({"deltachain/version": 1.0}, now, now)
    assert logged == [{"deltachain/version": 1.0}]


def test_an_optimizer_is_attached_and_a_publisher_used(run: Any) -> None:
    model = tiny()
    optimizer = sgd(model)
    _, url = run("README.md:1", model=model, optimizer=optimizer)
    step(model, optimizer)
    eventually(lambda: list((url / "manifests").glob("*1.json")))
    check(url, model, step=1)
    run("README.md:2", {"/mnt/policy": f"{url}-2"}, model=model, step=7)
    check(f"{url}-2", model, step=7)


class Seen(Exception):  # noqa: N818 - no error: what ends a loop that has no end
    pass


def test_following_prints_receipts(run: Any, tmp_path: Path) -> None:
    model, replica = tiny(), tiny()
    with deltachain.Publisher(str(tmp_path / "policy-chain")).attach(model) as publisher:
        step(model, sgd(model))
        publisher.publish(step=1).result()

    def print_(receipt: Any) -> None:
        raise Seen(str(receipt))

    with pytest.raises(Seen, match=r"^version 1 .*nnz"):
        run("README.md:3", model=replica, print=print_)
    assert same(bits_of(replica), bits_of(model))


def test_a_framework_without_a_module_is_published_and_followed(run: Any) -> None:
    model, replica = tiny(), tiny()
    weights, loaded = replica.state_dict(), list[int | None]()

    def load_weights(pairs: Any) -> None:
        for name, tensor in pairs:
            weights[name].copy_(tensor)

    def print_(step: int) -> None:
        loaded.append(step)
        raise Seen

    trainer = SimpleNamespace(
        named_weights=lambda: iter(model.state_dict().items()),
        train=lambda: step(model, sgd(model)),
    )
    run("docs/frameworks.md:0", trainer=trainer)
    engine = SimpleNamespace(weights=weights, load_weights=load_weights)
    with pytest.raises(Seen):
        run("docs/frameworks.md:1", engine=engine, print=print_)
    assert loaded == [3]
    assert same(bits_of(replica), bits_of(model))


def test_receipts_are_what_the_operations_page_says(run: Any, tmp_path: Path) -> None:
    model = tiny()
    shown: list[Any] = []
    with deltachain.Publisher(str(tmp_path / "policy-chain")).attach(model) as publisher:
        step(model, sgd(model))
        run("docs/operations.md:0", publisher=publisher, step=1, print=shown.append)
    receipt, metrics = shown
    assert re.match(r"version 1 delta nnz [\d,]+ density ", str(receipt))
    assert metrics["deltachain/version"] == 1


@contextmanager
def replica(folder: Path) -> Iterator[str]:
    here = followed(folder)
    leader = leader_of(next(here))
    with served(app_of(next(leader), token="secret")) as address:  # noqa: S106
        yield address
    for ending in (leader, here):
        next(ending, None)


def test_a_fleet_is_told(run: Any, tmp_path: Path) -> None:
    with replica(tmp_path / "replica") as address:
        namespace, _ = run(
            "docs/serve.md:0",
            {
                '"http://a:8000", "http://b:30000"': repr(address),
                "token=...": 'token="secret"',
                "deadline=10": "deadline=120",
            },
            receipt=SimpleNamespace(version=2),
        )
        announced = namespace["announced"]
        assert not announced.stragglers
        assert dict(announced.held) == {address: 2}
        namespace["fleet"].close()


def test_a_transfer_is_attached(run: Any) -> None:
    class AsyncGRPOTrainer:
        """What the transfer needs of TRL's, which starts an engine when it is made."""

        def __init__(self, *_: object, weight_transfer: object) -> None:
            self.weight_transfer = weight_transfer
            self.accelerator = SimpleNamespace(num_processes=1)
            self.callback_handler = SimpleNamespace(callbacks=[])

    namespace, _ = run("docs/serve.md:1", AsyncGRPOTrainer=AsyncGRPOTrainer)
    trainer, transfer = namespace["trainer"], namespace["transfer"]
    assert trainer.weight_transfer is transfer
    assert trainer.callback_handler.callbacks == [transfer]


def test_an_export_is_published(run: Any, tmp_path: Path) -> None:
    model = tiny()
    bridge = SimpleNamespace(export_hf_weights=lambda m: iter(m.state_dict().items()))
    publisher = deltachain.Publisher(str(tmp_path / "policy-chain"))
    _, url = run("docs/sharded-trainers.md:1", publisher=publisher, bridge=bridge, model=model)
    publisher.close()
    check(url, model, step=None)


def test_an_adapter_and_a_merged_model_are_published(run: Any, base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - takes seconds

    plain = Qwen3ForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model = get_peft_model(plain, LoraConfig(target_modules=["q_proj"]))
    publishers = [deltachain.Publisher(str(tmp_path / name)) for name in ("adapter", "merged")]
    waiting = iter(publishers)
    both = SimpleNamespace(attach=lambda *a, **k: next(waiting).attach(*a, **k))
    run("docs/sharded-trainers.md:2", publisher=both, model=model)
    for publisher in publishers:
        publisher.close()
    chains = [Chain.open(open_store(tmp_path / name)) for name in ("adapter", "merged")]
    adapter, merged = ({spec.name for spec in chain.table.specs()} for chain in chains)
    assert adapter
    assert all(".lora_" in name for name in adapter)
    assert [name for name, _ in chains[0].assets()] == ["adapter_config.json"]
    assert merged == set(load_file(base / "model.safetensors"))


def test_options_of_a_store(run: Any) -> None:
    namespace, _ = run("docs/stores.md:0", {"s3://policies/run-1": "s3://policies/run-1"})
    assert namespace["config"].storage_options["endpoint_url"] == "http://localhost:9000"


def test_every_block_is_run(request: pytest.FixtureRequest) -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    named = set(re.findall(r'run\(\s*"([\w./-]+\.md:\d+)"', source))
    assert named | ENGINE.keys() == PROGRAMS.keys()
    assert len(PROGRAMS) > 15
    assert request.config.rootpath == ROOT


@pytest.mark.parametrize(("name", "path"), ENGINE.items())
def test_a_block_for_an_engine_is_run_in_one(name: str, path: str) -> None:
    assert calls(PROGRAMS[name].text) <= calls((ROOT / path).read_text(encoding="utf-8"))


def calls(text: str) -> set[str]:
    found = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return {ast.unparse(function).rpartition(".")[2] for function in found}
