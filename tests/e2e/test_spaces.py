"""A training run that uses Spaces: the game in one, the rollouts in another, a bucket between.

Each is started as its image starts it, by its entrypoint or command, as user 1000, on port 7860,
with the Hub of the emulator and a token that may only read. Addresses of the loopback interface
stand for their host names.
"""

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest
from rich.console import Console

from deltachain.control.replica_client import ReplicaClient
from deltachain.store import open_store
from deltachain.subscribe import Subscriber
from examples.demo.evaluate import compare, manifests_in, verify
from examples.demo.online.engine import EngineKind
from examples.demo.online.game_transcripts import transcripts
from examples.demo.online.processes import Service, until
from examples.demo.online.report import unknown_in
from examples.demo.online.run import answers
from examples.demo.online.trainer import TrainerOptions, bits_of, diary_of
from examples.demo.pretrain import pretrain
from examples.demo.report import Display
from tests.containers import ARGUMENTS, ROOT, USER, VARIABLES, as_user, environment_in, home_of
from tests.support.hub.server import HubServer

pytestmark = pytest.mark.slow

GAME: Final = "127.0.0.2"
ROLLOUTS: Final = "127.0.0.3"
PORT: Final = 7860
TOKEN: Final = "only-for-this-test"  # noqa: S105
STEPS: Final = 12
START_S: Final = 240.0
TRAIN_S: Final = 900.0

SIZES: Final = {
    "vllm": "--max-model-len 256 --max-num-seqs 64 --enable-scale-out",
    "sglang": "--context-length 256 --max-total-tokens 16384 --max-running-requests 64",
}


def contained(name: str, command: list[str], folder: Path, environment: dict[str, str]) -> Service:
    given = [f"{variable}={value}" for variable, value in environment.items()]
    return Service(name, ["env", "-i", *given, *command], folder, {})


@contextmanager
def game(folder: Path) -> Iterator[Service]:
    python = ROOT / ".venv" / "bin" / "python"
    source = ROOT / "spaces" / "environment"
    (line,) = [
        line.removeprefix("CMD ")
        for line in (source / "Dockerfile").read_text(encoding="utf-8").splitlines()
        if line.startswith("CMD ")
    ]
    program, script, *options = json.loads(line)
    with home_of(python) as home:
        command = as_user(program, str(source / script), *options, "--host", GAME)
        made = contained("game", command, folder, environment_in(home, python))
        with made:
            until(lambda: answers(f"http://{GAME}:{PORT}/healthz"), made, START_S)
            yield made


@contextmanager
def rollouts(kind: EngineKind, folder: Path, hub: HubServer, url: str) -> Iterator[Service]:
    python = ROOT / f".venv-{kind}" / "bin" / "python"
    assert python.exists(), f"make venv-{kind}"
    settings = {
        **hub.env(),
        **VARIABLES[kind],
        "HF_TOKEN": hub.read_token,
        "DELTACHAIN_URL": url,
        "DELTACHAIN_TOKEN": TOKEN,
        "DELTACHAIN_HF_CALLS": "1000000",
        "ENGINE": kind,
        "HOST": ROLLOUTS,
        "OMP_NUM_THREADS": "1",
        "RETRY_S": "1",
        "ENGINE_ARGS": shlex.join(shlex.split(f"{ARGUMENTS[kind]} {SIZES[kind]}")),
    }
    with home_of(python) as home:
        entrypoint = ROOT / "spaces" / "rollout" / "entrypoint.sh"
        command = as_user("bash", str(entrypoint))
        with contained(kind, command, folder, environment_in(home, python) | settings) as made:
            yield made


def user_of(service: Service) -> int:
    status = Path(f"/proc/{service.pid}/status").read_text(encoding="utf-8")
    return int(status.partition("\nUid:")[2].split()[0])


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_run_whose_rollouts_are_a_space_that_is_restarted_in_its_middle(
    hub: HubServer, bucket: str, tmp_path: Path, kind: EngineKind
) -> None:
    hub.configure(calls=1_000_000)
    url, logs, folder = f"hf://buckets/{bucket}/run-1", tmp_path / "logs", tmp_path / "trainer"
    pretrain(
        tmp_path / "base",
        seed=0,
        steps=120,
        progress=lambda *_: None,
        text=transcripts,
    )
    folder.mkdir()
    orders = TrainerOptions(
        checkpoint=str(tmp_path / "base"),
        url=url,
        engine=f"http://{ROLLOUTS}:{PORT}",
        kind=kind,
        environment=f"http://{GAME}:{PORT}",
        folder=str(folder),
        steps=STEPS,
        seed=0,
        token=TOKEN,
    )
    orders.write(folder / "orders.json")
    steps: list[int] = []
    with ExitStack() as stack:
        playing = stack.enter_context(game(logs))
        serving = stack.enter_context(rollouts(kind, logs, hub, url))

        def heard(line: str) -> None:
            if line.startswith('{"event": "step"'):
                steps.append(json.loads(line)["step"])
                if steps[-1] == STEPS // 2:
                    serving.kill()

        module = [str(ROOT / ".venv" / "bin" / "python"), "-m", "examples.demo.online.trainer"]
        environment = hub.env() | {"DELTACHAIN_HF_CALLS": "1000000"}
        training = Service(
            "trainer",
            [*module, str(folder / "orders.json")],
            logs,
            environment,
            forever=False,
            heard=heard,
        )
        with training:
            training.wait(TRAIN_S)
        users = [user_of(playing), user_of(serving)]
        assert users == [USER if os.geteuid() == 0 else os.geteuid()] * 2
        assert steps == list(range(1, STEPS + 1))
        assert (playing.deaths, serving.deaths, training.deaths) == (0, 1, 0)

        options = {"token": hub.token, "endpoint": hub.url}
        head = manifests_in(open_store(url, options))[-1]
        with ReplicaClient(orders.engine, token=TOKEN) as replica:
            replica.update(head.version)
            status = replica.scrub()
        assert (status.version, status.state) == (head.version, head.state)

    with Subscriber(url, tmp_path / "pulled", store=open_store(url, options)) as newcomer:
        newcomer.update()
    found = compare("a newcomer", bits_of(folder), tmp_path / "pulled")
    assert found.elements > 1_000_000
    assert found.mismatching_bits == 0
    assert unknown_in(diary_of(folder)) == 0
    assert verify(url, environment, Display(Console()))
