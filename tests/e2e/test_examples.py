"""Each example as its user runs it, with a small model, and the engines and buckets it names."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest
import trl

from deltachain import Chain, open_store
from examples.demo.model import make_model, make_tokenizer, save_checkpoint
from examples.demo.online.engine import EngineKind, variables
from examples.demo.online.processes import Service, free_port, until
from examples.demo.online.run import answers
from tests.containers import ARGUMENTS
from tests.support.hub.server import HubServer
from tests.support.seaweed import Seaweed

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLES: Final = ROOT / "examples"
TOKEN: Final = "only-for-this-test"  # noqa: S105
HOST: Final = "127.0.0.1"
START_S: Final = 900.0
SIZES: Final = {
    "vllm": "--max-model-len 512 --max-num-seqs 8 --worker-extension-cls "
    """deltachain_vllm.WorkerExtension --weight-transfer-config '{"backend": "deltachain"}'""",
    "sglang": "--context-length 512 --max-total-tokens 8192 --max-running-requests 8",
}

slow = pytest.mark.slow


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "small"
    tokenizer = make_tokenizer()
    templates = Path(trl.__file__).with_name("chat_templates")
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text(encoding="utf-8")
    save_checkpoint(make_model(0), tokenizer, folder)
    return folder


def packages(venv: str) -> Path:
    (found,) = (ROOT / venv / "lib").glob("python*/site-packages")
    return found


def run(
    name: str,
    environment: Mapping[str, str],
    *,
    python: Path = Path(sys.executable),
    more: tuple[Path, ...] = (),
) -> str:
    script = [str(Path(__file__).with_name("run_example.py")), str(EXAMPLES / name)]
    done = subprocess.run(
        [str(python), *script, *map(str, more)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def receipts(printed: str) -> list[int]:
    return [
        int(version) for version in re.findall(r"^version (\d+) .*density", printed, re.MULTILINE)
    ]


def head_of(url: str, options: Mapping[str, str] | None = None) -> int:
    head = Chain.open(open_store(url, dict(options or {}))).head()
    assert head is not None
    return head.version


@contextmanager
def engine(
    kind: EngineKind, model: Path, folder: Path, environment: Mapping[str, str], name: str = ""
) -> Iterator[str]:
    python, port = ROOT / f".venv-{kind}" / "bin" / "python", free_port()
    assert python.exists(), f"make venv-{kind}"
    start = {
        "vllm": [str(python.with_name("vllm")), "serve", str(model)],
        "sglang": [str(python), "-m", "sglang.launch_server", "--model-path", str(model)],
    }[kind]
    place = ["--host", HOST, "--port", str(port)]
    command = [*start, *place, *shlex.split(f"{ARGUMENTS[kind]} {SIZES[kind]}")]
    given = {**variables(kind), "DELTACHAIN_TOKEN": TOKEN, **environment}
    with Service(name or kind, command, folder, given) as server:
        until(lambda: answers(f"http://{HOST}:{port}/health"), server, START_S)
        yield f"http://{HOST}:{port}"


def test_every_example_is_run_and_says_what_it_needs_and_prints() -> None:
    others = ("engines/ray_train", "unit/integrations/example_trial")
    paths = [Path(__file__), *(ROOT / "tests" / f"{one}.py" for one in others)]
    source = "".join(path.read_text(encoding="utf-8") for path in paths)
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in sorted(EXAMPLES.glob("[0-9]*.py")):
        text = path.read_text(encoding="utf-8")
        assert f'"{path.name}"' in source or f'"examples.{path.stem}"' in source
        assert f"({path.name})" in readme
        assert "examples.demo" not in text, path.name
        assert "deltachain.testing" not in text, path.name
        doc = text.split('"""')[1]
        assert "pip install" in doc, path.name
        assert "Prints" in doc, path.name


@slow
def test_a_loop_of_torch() -> None:
    # One that is busy with a version leaves the next to a later one.
    assert re.search(
        r"^version \d+: every bit is the trainer's$", run("01_torch.py", {}), re.MULTILINE
    )


@slow
def test_the_trainer_of_transformers_and_s3(model: Path, seaweed: Seaweed) -> None:
    url = seaweed.url("examples/trainer")
    printed = run("02_hf_trainer.py", {**seaweed.env(), "MODEL": str(model), "DELTACHAIN_URL": url})
    assert receipts(printed)[:5] == [1, 2, 3, 4, 5]
    assert "version 5: every bit is the trainer's" in printed
    assert head_of(url, seaweed.options) == 5


@slow
def test_grpo_and_a_bucket_of_the_hub(model: Path, hub: HubServer, bucket: str) -> None:
    url = f"hf://buckets/{bucket}/run-1"
    environment = {**hub.env(), "HF_HUB_OFFLINE": "0", "MODEL": str(model), "DELTACHAIN_URL": url}
    assert receipts(run("03_trl_grpo.py", environment)) == [1, 2, 3]
    assert head_of(url, {"token": hub.token, "endpoint": hub.url}) == 3


@slow
def test_rollouts_of_trl_from_two_replicas_behind_a_router(
    model: Path, seaweed: Seaweed, tmp_path: Path
) -> None:
    chain = {**seaweed.env(), "DELTACHAIN_URL": seaweed.url("examples/rollouts")}
    with ExitStack() as stack:
        engines = [
            stack.enter_context(engine("vllm", model, tmp_path, chain, name))
            for name in ("one", "two")
        ]
        port = free_port()
        router = Path(sys.executable).with_name("vllm-router")
        command = [str(router), "--worker-urls", *engines, "--policy", "round_robin"]
        place = ["--host", HOST, "--port", str(port), "--prometheus-port", str(free_port())]
        service = stack.enter_context(Service("router", [*command, *place], tmp_path, {}))
        address = f"http://{HOST}:{port}"
        until(lambda: answers(f"{address}/health"), service, START_S)
        environment = {
            **chain,
            "MODEL": str(model),
            "DELTACHAIN_TOKEN": TOKEN,
            "ENGINES": " ".join(engines),
            "ROUTER": address,
            "STEPS": "3",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "vllm_ext"))),
        }
        python = ROOT / ".venv-vllm" / "bin" / "python"  # TRL's worker asks for an installed vLLM
        printed = run(
            "04_async_grpo_vllm.py", environment, python=python, more=(packages(".venv"),)
        )
    assert receipts(printed)[:2] == [1, 2]
    assert re.search(r"version \d+ on 2 of 2", printed), printed
    for name in ("one", "two"):
        log = (tmp_path / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        assert "POST /v1/completions" in log, f"{name} sampled nothing"


@slow
def test_sglang_follows(model: Path, seaweed: Seaweed, tmp_path: Path) -> None:
    chain = {**seaweed.env(), "DELTACHAIN_URL": seaweed.url("examples/sglang")}
    follow = {"DELTACHAIN_FOLLOW": "1", "DELTACHAIN_POLL_S": "0.5"}
    with engine("sglang", model, tmp_path, chain | follow) as address:
        environment = {
            **chain,
            "MODEL": str(model),
            "DELTACHAIN_TOKEN": TOKEN,
            "ENGINE": address,
        }
        printed = run("05_sglang.py", environment)
    assert receipts(printed) == [1, 2, 3]
    assert "'version': '3'" in printed.splitlines()[-1]


@slow
def test_ranks_of_fsdp2(tmp_path: Path) -> None:
    url = str(tmp_path / "chain")
    assert "version 5" in run("06_fsdp2.py", {"DELTACHAIN_URL": url})
    assert head_of(url) == 5


@slow
def test_checkpoints() -> None:
    assert "every bit is the checkpoint's" in run("07_checkpoints.py", {})


@slow
def test_an_adapter(model: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "chain")
    printed = run("09_lora.py", {"MODEL": str(model), "DELTACHAIN_URL": url})
    assert receipts(printed)[:3] == [1, 2, 3]
    assert "version 3: every bit of the adapter is the trainer's" in printed


@slow
@pytest.mark.venv("openenv")
def test_a_game_of_openenv(model: Path, tmp_path: Path) -> None:
    url, port = str(tmp_path / "chain"), free_port()
    script = ROOT / "spaces" / "environment" / "server.py"
    command = [sys.executable, str(script), "--host", HOST, "--port", str(port)]
    with Service("game", command, tmp_path, {}) as game:
        address = f"http://{HOST}:{port}"
        until(lambda: answers(f"{address}/healthz"), game, START_S)
        environment = {"MODEL": str(model), "DELTACHAIN_URL": url, "GAME": address, "STEPS": "2"}
        printed = run("10_openenv.py", environment, more=(packages(".venv-openenv"),))
    assert receipts(printed) == [1, 2]
    assert re.search(r"^[1-9]\d* games$", printed, re.MULTILINE)


@slow
@pytest.mark.venv("verl")
def test_workers_of_rlinf() -> None:
    python = ROOT / ".venv-verl" / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:  # where no cluster of others is found
        printed = run("11_rlinf.py", {"RAY_TMPDIR": folder}, python=python)
    assert "a rollout joins before step 3: right" in printed
    assert "step 20 on 2 rollouts: every bit is the actor's" in printed
