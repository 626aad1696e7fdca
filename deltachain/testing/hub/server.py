"""Runs the emulated Hub in a process of its own, which can be killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx

import deltachain
from deltachain.testing.hub.settings import READ_TOKEN, S3_KEY, S3_SECRET, WRITE_TOKEN

if TYPE_CHECKING:
    from types import TracebackType

    from deltachain.testing.hub.faults import RequestFault

_START_S: Final = 60.0
_STOP_S: Final = 10.0


class HubServer:
    """A Hub on a free port of this machine. Everything it keeps is in ``folder``.

    It ends with this process at the latest.
    """

    token: Final = WRITE_TOKEN
    read_token: Final = READ_TOKEN
    s3_key: Final = S3_KEY
    s3_secret: Final = S3_SECRET

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # No connection is kept, as the server may be another one when it is used again.
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
        """Where it listens; the same after every start."""
        return f"http://127.0.0.1:{(self._folder / 'port').read_text()}"

    def env(self) -> dict[str, str]:
        """Variables by which a process finds it, with the token that may write."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": self.token,
            "HF_XET_TELEMETRY_ENABLED": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def start(self) -> None:
        """Start it unless it runs, and return when it answers.

        Raises:
            RuntimeError: It ended, or did not answer in a minute.
        """
        if self._process is not None and self._process.poll() is None:
            return
        root = str(Path(deltachain.__file__).parents[1])
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "HF_HOME": str(self._folder / "home"),
            "HF_XET_TELEMETRY_ENABLED": "0",
        }
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - no input of anybody's in it
                [sys.executable, "-m", "deltachain.testing.hub.app", str(self._folder)],
                stdin=subprocess.PIPE,  # its end tells the server that this process is gone
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
        """End it at once, in the middle of whatever it does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end, and end it if it does not."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """End it if it runs, and start it on the same port with what it had answered for."""
        self.kill()
        self.start()

    def counts(self, token: str = WRITE_TOKEN) -> dict[str, int]:
        """Requests of one token since the last start, by method and route.

        Under ``refused``, how many of these met the limit.
        """
        counted: dict[str, dict[str, int]] = self._admin("GET", "counts")
        return counted.get(token, {})

    def configure(self, **changes: object) -> None:
        """Change its ``Settings``, and begin new windows."""
        self._admin("POST", "settings", changes)

    def reset(self, **changes: object) -> None:
        """Put everything in order: default ``Settings`` but for these, new windows, no faults."""
        self._admin("POST", "reset", changes)

    def inject(self, *faults: RequestFault) -> None:
        """Let things go wrong."""
        for fault in faults:
            self._admin("POST", "faults", asdict(fault))

    def faults_left(self) -> int:
        """How many requests are still to be struck."""
        left: int = self._admin("GET", "faults")
        return left

    def clear_faults(self) -> None:
        """Let nothing go wrong any more."""
        self._admin("DELETE", "faults")

    def go_stale(self, seconds: float) -> None:
        """Let look-ups and listings show for a time what there is now; 0 ends that."""
        self._admin("POST", "stale", {"seconds": seconds})

    def create_bucket(self, bucket: str) -> None:
        """Make a bucket; the request is counted for nobody that a test is about."""
        headers = {"Authorization": f"Bearer {self.token}"}
        self._client.post(f"{self.url}/api/buckets/{bucket}", headers=headers).raise_for_status()

    def __enter__(self) -> HubServer:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it."""
        self.stop()
        self._client.close()

    def _admin(self, method: str, path: str, body: object = None) -> Any:  # noqa: ANN401 - JSON
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
