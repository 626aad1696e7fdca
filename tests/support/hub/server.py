"""Control of the emulated Hub in a process of its own, which can be killed and restarted."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx

from tests.support.hub.world import READ_TOKEN, S3_KEY, S3_SECRET, WRITE_TOKEN

if TYPE_CHECKING:
    from types import TracebackType

    from tests.support.hub.faults import RequestFault

_START_S: Final = 60.0
_STOP_S: Final = 10.0


class HubServer:
    token: Final = WRITE_TOKEN
    read_token: Final = READ_TOKEN
    s3_key: Final = S3_KEY
    s3_secret: Final = S3_SECRET

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # No keep-alive, since the server may restart between requests.
        self._client = httpx.Client(
            verify=False,  # noqa: S501 - plain HTTP; certificates take long to load
            limits=httpx.Limits(max_keepalive_connections=0),
            timeout=30,
            trust_env=False,
        )
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{(self._folder / 'port').read_text()}"

    def env(self) -> dict[str, str]:
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": self.token,
            "HF_XET_TELEMETRY_ENABLED": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        root = str(Path(__file__).parents[3])
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "HF_HOME": str(self._folder / "home"),
            "HF_XET_TELEMETRY_ENABLED": "0",
        }
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.hub.app", str(self._folder)],
                stdin=subprocess.PIPE,  # closed when this process exits, which ends the server
                stdout=log,
                stderr=log,
                env=env,
            )
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the Hub did not start; see {self._folder / 'server.log'}")
            time.sleep(0.05)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        self.kill()
        self.start()

    def counts(self, token: str = WRITE_TOKEN) -> dict[str, int]:
        counted: dict[str, dict[str, int]] = self._admin("GET", "counts")
        return counted.get(token, {})

    def configure(self, **changes: object) -> None:
        self._admin("POST", "settings", changes)

    def reset(self, **changes: object) -> None:
        self._admin("POST", "reset", changes)

    def inject(self, *faults: "RequestFault") -> None:
        for fault in faults:
            self._admin("POST", "faults", asdict(fault))

    def faults_left(self) -> int:
        left: int = self._admin("GET", "faults")
        return left

    def clear_faults(self) -> None:
        self._admin("DELETE", "faults")

    def go_stale(self, seconds: float) -> None:
        self._admin("POST", "stale", {"seconds": seconds})

    def create_bucket(self, bucket: str) -> None:
        headers = {"Authorization": f"Bearer {self.token}"}
        self._client.post(f"{self.url}/api/buckets/{bucket}", headers=headers).raise_for_status()

    def __enter__(self) -> "HubServer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: "TracebackType | None",
    ) -> None:
        self.stop()
        self._client.close()

    def _admin(self, method: str, path: str, body: object = None) -> Any:
        reply = self._client.request(method, f"{self.url}/_admin/{path}", json=body)
        return reply.raise_for_status().json()

    def _answers(self) -> bool:
        try:
            self._admin("GET", "counts")
        except (httpx.TransportError, FileNotFoundError):
            return False
        return True

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
