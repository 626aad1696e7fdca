"""The services of the compose file as plain processes, from its commands and environment files."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.support import seaweed
from tests.unit.deploy.recipes import DEPLOY, ROOT, services, variables

PATIENCE_S: Final = 240.0
HOST: Final = seaweed.HOST

PRESENCE: Final = variables(DEPLOY / "compose" / "store.env")["DELTACHAIN_PRESENCE_URL"]

WITHOUT_A_CPU: Final = ("replica", "prometheus", "grafana")
"""Services that need a GPU or another project's image."""


@dataclass(slots=True)
class Machine:
    """One machine in place of the containers: their paths and addresses, mapped."""

    root: Path
    model: Path
    stack: ExitStack
    ports: dict[str, int] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def mapped(self, service: str, text: str) -> str:
        text = text.replace("/run/secrets/", f"{self.root}/secrets/")
        text = re.sub(r"(?<![\w.])/data\b", f"{self.root}/{service}", text)
        text = text.replace("http://store:8333", f"http://{HOST}:{self.ports['store']}")
        text = text.replace("0.0.0.0:9095", f"{HOST}:{self.ports.get(service, 0)}")
        return text.replace("0.0.0.0", HOST)  # noqa: S104

    def environment(self, service: str, given: Mapping[str, Any]) -> dict[str, str]:
        found = {"PATH": os.environ["PATH"], "HOME": str(self.root)}
        found["PYTHONPATH"] = os.environ.get("PYTHONPATH", str(ROOT))
        for file in given.get("env_file", ()):
            found |= variables(DEPLOY / "compose" / file)
        if service == "trainer":
            found |= {"MODEL": str(self.model), "STEP_S": "0.5", "LEARNING_RATE": "1e-3"}
        return {name: self.mapped(service, value) for name, value in found.items()}

    def start(self, service: str, *more: str) -> subprocess.Popen[bytes]:
        given = services()[service]
        (self.root / service).mkdir(exist_ok=True)
        words = [self.mapped(service, word) for word in given["command"]]
        program = {
            "python": [sys.executable],
            "deltachain": [sys.executable, "-m", "deltachain"],
            "server": [seaweed._binary(), "server"],
        }[words[0]]
        log = self.stack.enter_context((self.root / f"{service}.log").open("wb"))
        process = subprocess.Popen(
            [*program, *words[1:], *more],
            env=self.environment(service, given),
            cwd=DEPLOY if words[0] == "python" else self.root,
            stdout=log,
            stderr=log,
        )
        self.stack.callback(end, process)
        self.running[service] = process
        return process

    def until(self, service: str, found: Callable[[], bool]) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not found():
            log = (self.root / f"{service}.log").read_text(errors="replace")[-2000:]
            assert self.running[service].poll() is None, log
            assert time.monotonic() < limit, log
            time.sleep(0.1)

    def metric(self, service: str, name: str) -> float:
        try:
            answer = httpx.get(f"http://{HOST}:{self.ports[service]}/metrics", trust_env=False)
        except httpx.HTTPError:
            return -1.0
        found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", answer.text, re.MULTILINE)
        return float(found[1]) if found else -1.0


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait(30)


def make_secrets(folder: Path) -> dict[str, str]:
    """Run the script of the recipe: what its files hold."""
    made = folder / "secrets"
    command = ["bash", str(DEPLOY / "compose" / "make_secrets.sh"), str(made)]
    subprocess.run(command, check=True, timeout=60)
    return {path.name: path.read_text() for path in made.iterdir()}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    make_secrets(tmp_path)
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=128,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    with ExitStack() as stack:
        yield Machine(root=tmp_path, model=tmp_path / "model", stack=stack)


@pytest.mark.full
def test_the_services_train_mirror_and_follow(machine: Machine) -> None:
    base = seaweed._free_block(HOST)
    flags = {name: base + number for number, name in enumerate(seaweed._PORTS)}
    machine.ports |= {"store": flags["s3.port"]}
    for number, service in enumerate(("trainer", "mirror", "folder")):
        machine.ports[service] = seaweed._free_block(HOST) + number
    store = machine.start(
        "store",
        f"-ip={HOST}",
        *(f"-{name}={port}" for name, port in flags.items()),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
    )
    check = services()["store"]["healthcheck"]["test"][-1].partition("8333")[2]
    machine.until("store", lambda: answers(f"http://{HOST}:{flags['s3.port']}{check}"))
    buckets = machine.start("buckets")
    assert buckets.wait(PATIENCE_S) == 0, (machine.root / "buckets.log").read_text()

    for service in services().keys() - {"store", "buckets", *WITHOUT_A_CPU}:
        machine.start(service)
    machine.until("folder", lambda: machine.metric("folder", "deltachain_version") >= 3)
    assert machine.metric("trainer", "deltachain_commits_total") >= 3
    assert machine.running["maintainer"].poll() is None
    shown = deltachain(machine, "fleet", "status", "--json", "--presence", PRESENCE)
    assert {row["software"] for row in json.loads(shown.stdout)["replicas"]} == {"follow", "mirror"}

    trainer = machine.running["trainer"]
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(PATIENCE_S) == 0, (machine.root / "trainer.log").read_text()
    newest = head(machine, "s3://policies/run-1")
    machine.until("folder", lambda: machine.metric("folder", "deltachain_version") == newest)
    assert head(machine, "s3://mirror/run-1") == newest
    assert deltachain(machine, "verify", "s3://mirror/run-1").returncode == 0

    for service in ("folder", "mirror", "maintainer"):
        machine.running[service].send_signal(signal.SIGTERM)
    for service in ("folder", "mirror", "maintainer"):
        code = machine.running[service].wait(PATIENCE_S)
        assert code in (0, 143, -signal.SIGTERM), (machine.root / f"{service}.log").read_text()
    state = json.loads((machine.root / "folder" / "policy" / "deltachain.json").read_text())
    assert state["held"]["version"] == newest
    assert store.poll() is None


def test_secrets_are_made_once_and_for_their_owner(tmp_path: Path) -> None:
    first = make_secrets(tmp_path)
    assert make_secrets(tmp_path) == first
    assert first.keys() == {"aws", "s3.json", "token"}
    assert len(first["token"].strip()) >= 20
    (identity,) = json.loads(first["s3.json"])["identities"]
    assert identity["credentials"][0]["secretKey"] in first["aws"]
    assert (tmp_path / "secrets").stat().st_mode & 0o077 == 0


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=2).is_success
    except httpx.HTTPError:
        return False


def deltachain(machine: Machine, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deltachain", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=machine.environment("client", {"env_file": ["store.env"]}),
    )


def head(machine: Machine, url: str) -> int:
    done = deltachain(machine, "inspect", url, "--json")
    assert done.returncode == 0, done.stderr
    version: int = json.loads(done.stdout)["version"]
    return version
