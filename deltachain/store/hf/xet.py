"""Content of a bucket by hash, through ``hf_xet``, whose errors are converted here.

A failed stream of ``hf_xet`` may simply end early, so the bytes are counted, and if some are
missing, the storage itself is asked for the size of the content. A bit flipped in transit is not
detected here: readers compare digests.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from deltachain.errors import MalformedError, StoreUnavailableError
from deltachain.retry import Deadline
from deltachain.store import base
from deltachain.store.calls import within
from deltachain.store.hf.api import PAUSES, Hub
from deltachain.types import Buffer

_Kind: TypeAlias = Literal["read", "write"]

EMPTY: Final = "0" * 64  # hash of the empty content, which is never requested from the storage

_HASH: Final = re.compile(r"[0-9a-f]{64}")

_BLOCK: Final = 8 << 20  # given to hf_xet at once: it handles larger buffers poorly
_SPARE_S: Final = 60.0  # before expiry, from which on a token is not used; hf_xet does the same
_ERRORS: Final = (OSError, RuntimeError, ValueError)  # hf_xet's derive from two OSErrors

_sessions: dict[tuple[int, float], Any] = {}
_sessions_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Access:
    endpoint: str
    token: str = field(repr=False)
    expires: int
    good_until: float

    def arguments(self) -> dict[str, Any]:
        """Return arguments for ``hf_xet``: none to renew the token by requests nobody counts."""
        return {
            "endpoint": self.endpoint,
            "token": self.token,
            "token_expiry_unix_secs": self.expires,
        }


class Xet:
    def __init__(self, hub: Hub) -> None:
        self._hub, self._lib = hub, hub.xet
        self._url = hub.place.url
        self._locks = {"read": threading.Lock(), "write": threading.Lock()}
        self._held: dict[_Kind, _Access] = {}

    def read(self, content: str, *, nbytes: int, key: str) -> bytearray:
        """Read a whole content of ``nbytes`` bytes; keep received bytes when an attempt fails."""
        if _HASH.fullmatch(content) is None:
            raise MalformedError(f"object {key!r}: {content[:80]!r} is not a Xet hash", key=key)
        # One byte more than expected is requested, to detect longer content. A separate stream
        # for that byte would prove nothing if empty: a failed stream looks the same.
        data = self._collect(content, 0, nbytes + 1, nbytes, key) if nbytes else bytearray()
        if len(data) != nbytes or (not nbytes and content != EMPTY):
            base.check_nbytes(key, self._url, expected=nbytes, actual=self._measure(content, key))
            raise MalformedError(f"object {key!r} in {self._url}: it has no fixed size", key=key)
        return data

    def read_range(self, content: str, start: int, length: int, *, key: str) -> bytearray:
        return self._collect(content, start, start + length, length, key)

    def write(self, data: Buffer, *, key: str) -> str:
        """Upload content, which stays invisible until a path refers to it; return its hash."""
        view = base.bytes_view(data)
        deadline, tries = self._hub.deadline(key), 0
        while True:
            access = self._access("write")
            try:
                return self._upload(access, view)
            except _ERRORS as exc:
                self._forget("write", access)
                tries += 1
                self._pause(deadline, tries, exc, key)

    def _collect(self, content: str, start: int, end: int, expected: int, key: str) -> bytearray:
        """Read bytes ``start`` to ``end``, or ``expected`` of them if the content ends there."""
        data = bytearray()
        if content == EMPTY or start == end:
            return data
        deadline, tries = self._hub.deadline(key, end - start), 0
        while True:
            trouble: Exception | None = None
            got = bytearray()  # of this attempt: one that was given up may go on
            access = self._access("read")  # outside the try: may be an OSError
            span = start + len(data), end
            try:
                within(partial(self._stream, access, content, span, got, deadline), deadline)
            except _ERRORS as exc:
                trouble = exc
            data += bytes(got)
            if len(data) >= expected:
                return data
            if got:  # progress: the deadline limits stalls only
                deadline, tries = self._hub.deadline(key, end - start), 0
            if not self._has_more(content, start + len(data), key):
                return data
            tries += 1
            self._pause(deadline, tries, trouble, key)

    def _stream(
        self, access: _Access, content: str, span: tuple[int, int], data: bytearray, limit: Deadline
    ) -> None:
        group = self._session().new_download_stream_group(**access.arguments())
        info = self._lib.XetFileInfo(content, span[1])
        for chunk in group.download_stream(info, start=span[0], end=span[1]):
            limit.moved()
            data += chunk

    def _has_more(self, content: str, position: int, key: str) -> bool:
        try:
            return self._measure(content, key) > position
        except StoreUnavailableError:
            return True

    def _measure(self, content: str, key: str) -> int:
        """Return the size of a content, by one request to the storage, not to the Hub."""
        if content == EMPTY:
            return 0
        access = self._access("read")
        status, document = self._hub.ask(
            f"{access.endpoint}/v1/reconstructions/{content}", access.token
        )
        if status == 404:
            raise base.not_found(key, self._url)
        if status == 401:
            self._forget("read", access)
        try:
            return sum(term["unpacked_length"] for term in document["terms"])
        except (KeyError, TypeError) as exc:
            raise StoreUnavailableError(
                f"{self._url}: the storage answered {status}", key=key, url=self._url
            ) from exc

    def _upload(self, access: _Access, view: memoryview) -> str:
        commit = self._session().new_upload_commit(**access.arguments())
        skip = self._lib.SKIP_SHA256

        def progress() -> int:
            report = commit.progress()
            return int(report.total_bytes_completed + report.total_transfer_bytes_completed)

        with _watched(progress, commit.abort, self._hub.deadline_s), commit:
            if len(view) <= _BLOCK:
                handle = commit.start_upload_bytes(bytes(view), sha256=skip)
            else:
                stream = commit.start_upload_stream(sha256=skip)
                for start in range(0, len(view), _BLOCK):
                    stream.write(bytes(view[start : start + _BLOCK]))
                done = stream.finish()
        info = (handle.result() if len(view) <= _BLOCK else done).xet_info
        if info.file_size != len(view):
            raise RuntimeError(f"{info.file_size} bytes of {len(view)} arrived")
        return str(info.hash)

    def _pause(self, deadline: Deadline, tries: int, trouble: Exception | None, key: str) -> None:
        if deadline.pause(PAUSES.pause_s(tries - 1)):
            return
        said = str(trouble) if trouble else "the stream ended early"
        hint = "the disk is full: free some space" if "No space left" in said else ""
        raise base.unavailable(key, self._url, said, hint) from trouble

    def _access(self, kind: _Kind) -> _Access:
        with self._locks[kind]:
            held = self._held.get(kind)
            if held is None or time.time() >= held.good_until:
                reply = self._hub.call("GET", f"xet-{kind}-token", dict)
                held = self._held[kind] = _parse_access(reply.document(), self._url)
            return held

    def _forget(self, kind: _Kind, access: _Access) -> None:
        with self._locks[kind]:
            if self._held.get(kind) is access:
                del self._held[kind]

    def _session(self) -> Any:  # noqa: ANN401 - untyped
        """Return the session of this process: one that came over a fork has no threads."""
        which = (os.getpid(), self._hub.deadline_s)
        with _sessions_lock:
            if which not in _sessions:
                # Few internal retries, since ours follow; the user's settings win.
                ours: dict[str, Any] = {
                    "client.retry_max_attempts": 1,
                    "client.retry_base_delay": "500ms",
                    "client.retry_max_duration": f"{round(self._hub.deadline_s * 1000)}ms",
                }
                unset = {
                    name: value
                    for name, value in ours.items()
                    if f"HF_XET_{name.replace('.', '_').upper()}" not in os.environ
                }
                _sessions[which] = self._lib.XetSession(self._lib.XetConfig().with_config(unset))
            return _sessions[which]


def _parse_access(document: Any, url: str) -> _Access:  # noqa: ANN401 - JSON
    try:
        expires = int(document["exp"])
        return _Access(
            endpoint=str(document["casUrl"]).rstrip("/"),
            token=str(document["accessToken"]),
            expires=expires,
            good_until=expires - _SPARE_S,
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise StoreUnavailableError(f"{url}: the Hub gave no storage token", url=url) from exc


@contextmanager
def _watched(
    progress: Callable[[], int], abort: Callable[[], None], patience_s: float
) -> Iterator[None]:
    """Abort an upload without progress: ``hf_xet`` itself waits for many minutes."""
    done = threading.Event()

    def watch() -> None:
        seen, since = -1, time.monotonic()
        while not done.wait(min(1.0, patience_s / 4)):
            now = progress()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since >= patience_s:
                abort()
                return

    watcher = threading.Thread(target=watch, name="deltachain-xet-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
