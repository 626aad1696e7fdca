"""The entrypoint of a Space with a real engine, an ordinary user, and either kind of bucket.

It has the images' own command line but for what the engine needs on a CPU.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import httpx
import pytest

from examples.demo.online.processes import free_port
from tests.containers import ARGUMENTS, USER, VARIABLES, as_user, environment_in, home_of
from tests.engines.serving import ENGINE, HOST, ROOT, START_S
from tests.engines.trainer import Trainer
from tests.support.hub.server import HubServer
from tests.support.seaweed import Seaweed

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKEN: Final = "only-for-this-test"  # noqa: S105
STOP_S: Final = 60.0
PATIENCE_S: Final = 120.0

SIZES: Final = {
    "vllm": "--max-model-len 512 --max-num-seqs 8",
    "sglang": "--context-length 512 --max-total-tokens 8192 --max-running-requests 8",
}
PREFIX: Final = {"vllm": "/v1/deltachain", "sglang": "/deltachain"}


class Space:
    def __init__(self, home: Path, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        self.home = home
        port = free_port()
        self._environment = {
            **environment_in(home, Path(sys.executable)),
            "ENGINE": ENGINE,
            "HOST": HOST,
            "PORT": str(port),
            "ENGINE_ARGS": f"{ARGUMENTS[ENGINE]} {SIZES[ENGINE]}",
            "DELTACHAIN_TOKEN": TOKEN,
            **VARIABLES[ENGINE],
            **environment,
        }
        self.client = httpx.Client(
            base_url=f"http://{HOST}:{port}",
            headers={"x-deltachain-token": TOKEN},
            limits=httpx.Limits(max_keepalive_connections=0),
            timeout=120,
            trust_env=False,
        )
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.client.close()

    def start(self) -> None:
        entrypoint = ROOT / "spaces" / "rollout" / "entrypoint.sh"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                as_user("bash", str(entrypoint)),
                cwd=self.home,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(STOP_S)

    def first_process(self) -> tuple[int, str]:
        assert self._process is not None
        folder = Path("/proc") / str(self._process.pid)
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        status = (folder / "status").read_text()
        return int(status.partition("\nUid:")[2].split()[0]), command.lower()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for_log(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.log():
            self._check(deadline)

    def wait_for(self, version: int) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(httpx.TransportError):
                answer = self.client.get(f"{PREFIX[ENGINE]}/ready")
                assert answer.status_code in (200, 503), f"{answer.text}\n{self.log()}"
                if answer.status_code == 200 and answer.json()["version"] == version:
                    return
            self._check(deadline)

    def prove(self) -> dict[str, Any]:
        answer = self.client.post(f"{PREFIX[ENGINE]}/scrub")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def generate(self) -> str:
        body = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 16, "temperature": 0}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def _check(self, deadline: float) -> None:
        tail = "\n".join(self.log().splitlines()[-60:])
        assert self._process is not None
        assert self._process.poll() is None, f"it ended:\n{tail}"
        assert time.monotonic() < deadline, tail
        time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Bucket:
    url: str
    reader: Mapping[str, str]


@pytest.fixture(params=["hub", "s3"])
def chain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    if request.param == "s3":
        seaweed: Seaweed = request.getfixturevalue("seaweed")
        writer, found = seaweed.env(), Bucket(seaweed.url("space/run-1"), seaweed.env())
    else:
        hub: HubServer = request.getfixturevalue("hub")
        hub.configure(calls=1_000_000)
        url = f"hf://buckets/{request.getfixturevalue('bucket')}/run-1"
        reader = {"HF_TOKEN": hub.read_token, "DELTACHAIN_HF_CALLS": "1000000"}
        writer, found = hub.env(), Bucket(url, hub.env() | reader)
    for name, value in writer.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def home() -> Iterator[Path]:
    with home_of(Path(sys.executable)) as folder:
        yield folder


@pytest.fixture
def space(chain: Bucket, home: Path, tmp_path: Path) -> Iterator[Space]:
    often = {"DELTACHAIN_URL": chain.url, "DELTACHAIN_POLL_S": "0.5", "RETRY_S": "1"}
    with Space(home, tmp_path / "log", {**chain.reader, **often}) as space:
        yield space


def test_a_space_that_is_killed_is_back_at_the_head(
    space: Space, chain: Bucket, tmp_path: Path
) -> None:
    space.start()
    space.wait_for_log("no publisher has created a chain here yet")
    with Trainer(tmp_path, chain.url) as trainer:
        trainer.step()
        space.wait_for(trainer.head)
        user, command = space.first_process()
        assert user == (USER if os.geteuid() == 0 else os.geteuid())
        assert ENGINE in command
        assert "entrypoint" not in command
        assert TOKEN not in command
        space.wait_for(trainer.step())
        assert space.prove()["version"] == trainer.head
        before = space.generate()

        space.kill()
        for _ in range(3):
            trainer.step()
        space.start()
        space.wait_for_log(f"version {trainer.head} in {space.home / 'policy'}")
        space.wait_for(trainer.head)
        assert space.prove()["version"] == trainer.head
        assert space.generate() != before
        space.wait_for(trainer.step())
    space.stop()
