"""State of an emulated Hub, in one folder."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from tests.support.hub.auth import Signer
from tests.support.hub.buckets import Buckets
from tests.support.hub.cas import Cas
from tests.support.hub.settings import Settings


class World:
    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._session: Any = None
        self.url = url
        self.settings = Settings.load(folder)
        self.signer = Signer(folder)
        self.cas = Cas(folder / "cas")
        self.buckets = Buckets(folder / "buckets.sqlite")

    def change(self, changes: dict[str, Any]) -> None:
        self.settings = self.settings.changed(changes)
        self.settings.save(self._folder)

    def read(self, content: str, nbytes: int) -> bytes:
        if nbytes == 0:
            return b""
        import hf_xet  # noqa: PLC0415 - slow, and unused by most tests

        group = self._client(hf_xet).new_download_stream_group(**self._access("xet-read"))
        return b"".join(group.download_stream(hf_xet.XetFileInfo(content, nbytes)))

    def write(self, data: bytes) -> tuple[str, int]:
        import hf_xet  # noqa: PLC0415

        commit = self._client(hf_xet).new_upload_commit(**self._access("xet-write"))
        with commit:
            handle = commit.start_upload_bytes(data, sha256=hf_xet.SKIP_SHA256)
        info = handle.result().xet_info
        return str(info.hash), int(info.file_size)

    def _client(self, hf_xet: Any) -> Any:
        with self._lock:
            if self._session is None:
                self._session = hf_xet.XetSession()
            return self._session

    def _access(self, subject: str) -> dict[str, Any]:
        expires = int(time.time()) + 3600
        return {
            "endpoint": f"{self.url}/cas",
            "token": self.signer.sign(subject, expires),
            "token_expiry_unix_secs": expires,
        }
