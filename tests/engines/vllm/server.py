"""A stock ``vllm serve`` on this machine alone, for as long as a test needs it.

::

    with Server(checkpoint, folder, url) as server:
        server.update(3)
        server.generate([1, 2, 3], 20)
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import httpx

HOST: Final = "127.0.0.1"
MODEL: Final = "tiny"
ROOT: Final = Path(__file__).resolve().parents[3]

EXTENSIONS: Final[Mapping[str, str]] = {
    "stock": "deltachain_vllm.WorkerExtension",
    "strikes": "tests.engines.vllm.strikes.WorkerExtension",
    "plain": "tests.engines.vllm.plain.WorkerExtension",
}

START_S: Final = 240.0
STOP_S: Final = 15.0
PATIENCE_S: Final = 60.0

_LEASH: Final = "import os, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), 9)"
"""Ends a server whose test was killed: that closes its end of the pipe."""

_ENVIRONMENT: Final[Mapping[str, str]] = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "deltachain,deltachain_http",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What a request came back with.

    Attributes:
        prompt: Token ids that were asked with.
        tokens: Token ids that came.
        finish: Why there are no more.
        spans: First token, end and version of each stretch, as the server labels them.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: str
    spans: tuple[tuple[int, int, str], ...]


class Server:
    """One server. It is started by entering it, and gone with all its processes after leaving it.

    Args:
        checkpoint: What it loads.
        folder: Gets its log and its spool; made if it is not there.
        url: The chain it follows; empty for none.
        tp: Ranks of tensor parallelism.
        environment: More variables.
        arguments: More of the command line.
        key: API key.
        dev: Whether vLLM's own development routes are open: an oracle of weights is among them.
        plain: Whether linear layers keep their weights; see :mod:`tests.engines.vllm.plain`.
        strikes: The file of :mod:`tests.engines.vllm.strikes`, to let ranks fail.
    """

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        url: str = "",
        *,
        tp: int = 1,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        key: str = "",
        dev: bool = False,
        plain: bool = False,
        strikes: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "log"
        self.spool = folder / "spool"
        self.port = _free_port()
        given = {"DELTACHAIN_URL": url, "DELTACHAIN_SPOOL": str(self.spool)} if url else {}
        if tp > 1:
            given["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
        if dev:
            given["VLLM_SERVER_DEV_MODE"] = "1"
        if strikes:
            given["DELTACHAIN_TEST_STRIKE"] = str(strikes)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DELTACHAIN_")}
        self._environment = {**inherited, **_ENVIRONMENT, **given, **(environment or {})}
        kind = "plain" if plain else "strikes" if strikes else "stock"
        self._command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint)),
            *("--host", HOST, "--port", str(self.port), "--served-model-name", MODEL),
            *("--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "8"),
            *("--enforce-eager", "--enable-scale-out", "--tensor-parallel-size", str(tp)),
            *("--worker-extension-cls", EXTENSIONS[kind]),
            *("--weight-transfer-config", '{"backend":"deltachain"}'),
            *(("--api-key", key) if key else ()),
            *arguments,
        ]
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if token := self._environment.get("DELTACHAIN_TOKEN"):
            headers["x-deltachain-token"] = token
        self.client = httpx.Client(
            base_url=f"http://{HOST}:{self.port}", headers=headers, timeout=120, trust_env=False
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._leash: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        try:
            leash = [sys.executable, "-S", "-c", _LEASH, str(self._process.pid)]
            self._leash = subprocess.Popen(leash, stdin=subprocess.PIPE, start_new_session=True)
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.client.close()

    def stop(self) -> float:
        """Ask the server to end, and end all of its processes; the seconds that asking took."""
        if self._process is None:
            return 0.0
        process, self._process = self._process, None
        start = time.monotonic()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        took = time.monotonic() - start
        with suppress(ProcessLookupError):  # nobody is left of its group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if self._leash is not None:
            self._leash.kill()
            self._leash.communicate()
            self._leash = None
        return took

    @property
    def alive(self) -> bool:
        """Whether its first process runs."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """Everything that it printed so far."""
        return self.log_path.read_text(errors="replace")

    def get(self, path: str) -> httpx.Response:
        """Ask something of deltachain."""
        return self.client.get(f"/v1/deltachain/{path}")

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Tell deltachain something."""
        return self.client.post(f"/v1/deltachain/{path}", json=body)

    def status(self) -> dict[str, Any]:
        """What the replica says of itself."""
        response = self.get("status")
        assert response.status_code == 200, response.text
        return dict(response.json())

    def update(self, version: int | None = None) -> dict[str, Any]:
        """Bring it to a version, which must work; the status afterwards."""
        response = self.post("update", **({} if version is None else {"version": version}))
        assert response.status_code == 200, response.text
        return dict(response.json())

    def generate(self, prompt: Sequence[int], length: int) -> Generated:
        """Greedy tokens after a prompt, and the versions that they were made with."""
        body = {
            "model": MODEL,
            "token_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_tokens": length, "ignore_eos": True},
        }
        response = self.client.post("/inference/v1/generate", json=body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        return Generated(
            prompt=tuple(prompt),
            tokens=tuple(choice["token_ids"] or ()),
            finish=choice["finish_reason"],
            spans=tuple(
                (span["start"], span["end"], span["version"])
                for span in choice["weight_versions"] or ()
            ),
        )

    def checksums(self) -> dict[str, str]:
        """sha256 of every parameter by rank and name, as vLLM itself computes them."""
        response = self.client.post("/weight_checker", json={"action": "checksum"})
        assert response.status_code == 200, response.text
        return {
            name.partition(":pcp0:")[2]: digest
            for name, digest in response.json()["checksums"].items()
        }

    def wait_for(
        self, what: Callable[[dict[str, Any]], object], within_s: float = PATIENCE_S
    ) -> Any:
        """Look at the status again and again until it is as wanted; returns it."""
        deadline = time.monotonic() + within_s
        while not what(found := self.status()):
            assert time.monotonic() < deadline, f"{found}\n{self._tail()}"
            time.sleep(0.05)
        return found

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            if not self.alive:
                raise RuntimeError(f"the server ended:\n{self._tail()}")
            with suppress(httpx.TransportError):
                if self.client.get("/health").status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(f"not healthy after {START_S:.0f} s:\n{self._tail()}")
            time.sleep(0.2)

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-60:])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])
