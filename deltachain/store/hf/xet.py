"""Content of a bucket by hash, through ``hf_xet``. Its errors end here.

What ``hf_xet`` says is not trusted. A stream that failed may just end early, so the bytes are
counted, and where some are missing the storage itself is asked how large the content is. A bit that
flipped on the way is not noticed at all: whoever reads has a digest to compare.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from deltachain.errors import ConfigError, MalformedError, StoreUnavailableError
from deltachain.retry import Deadline
from deltachain.store.base import bytes_view, check_nbytes, not_found
from deltachain.store.hf.api import PAUSES, Hub, parse_reply
from deltachain.types import Buffer

_Kind: TypeAlias = Literal["read", "write"]

EMPTY: Final = "0" * 64
"""Hash of the content without bytes, which no storage is asked for."""

_HASH: Final = re.compile(r"[0-9a-f]{64}")

_BLOCK: Final = 8 << 20
"""Bytes that are handed to ``hf_xet`` at once: it takes whole buffers of many gigabytes badly."""

_SPARE_S: Final = 60.0
"""Seconds before its end from which on a token is not used for anything new; ``hf_xet`` refuses
one that is about to end, too."""

_ERRORS: Final = (OSError, RuntimeError, ValueError)
"""All that ``hf_xet`` raises: its own two classes are a PermissionError and a FileNotFoundError."""

_sessions: dict[tuple[int, _Kind, float], Any] = {}
_sessions_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Access:
    """Cached access token of the storage."""

    endpoint: str
    token: str = field(repr=False)
    expires: int
    good_until: float

    def arguments(self) -> dict[str, Any]:
        """Return arguments for ``hf_xet``.

        Without an address to renew the token at: that would be a request that nobody counts.
        """
        return {
            "endpoint": self.endpoint,
            "token": self.token,
            "token_expiry_unix_secs": self.expires,
        }


class Xet:
    """The content of one bucket. Safe to use from any thread, and after a fork."""

    def __init__(self, hub: Hub) -> None:
        try:
            import hf_xet  # noqa: PLC0415 - an extra
        except ImportError as exc:
            raise ConfigError(
                "hf:// stores need huggingface_hub and hf-xet",
                hint="pip install 'deltachain[hf]'",
            ) from exc
        self._lib: Any = hf_xet
        self._hub = hub
        self._url = hub.place.url
        self._locks = {"read": threading.Lock(), "write": threading.Lock()}
        self._held: dict[_Kind, _Access] = {}

    def read(self, content: str, *, nbytes: int, key: str) -> bytearray:
        """All of a content that must have ``nbytes`` bytes. What arrived is kept when a try fails.

        Raises:
            ObjectNotFoundError: The storage has no such content.
            MalformedError: It has another size (no memory was taken but for what there is), or this
                is no hash.
            StoreUnavailableError: Nothing more arrived for as long as the deadline allows.
        """
        if _HASH.fullmatch(content) is None:
            raise MalformedError(f"object {key!r}: {content[:80]!r} is not a Xet hash", key=key)
        # One byte more than expected is asked for, to notice if there is one. A stream of none
        # would prove nothing: one that failed looks the same.
        data = self._collect(content, 0, nbytes + 1, nbytes, key) if nbytes else bytearray()
        if len(data) != nbytes or (not nbytes and content != EMPTY):
            check_nbytes(key, self._url, expected=nbytes, actual=self._measure(content, key))
            raise MalformedError(f"object {key!r} in {self._url}: it has no fixed size", key=key)
        return data

    def read_range(self, content: str, start: int, length: int, *, key: str) -> bytearray:
        """Bytes of a content that is known to have them; errors as of ``read``."""
        return self._collect(content, start, start + length, length, key)

    def write(self, data: Buffer, *, key: str) -> str:
        """Put content into the storage, where it stays invisible until a path is given to it.

        Returns:
            Its hash.

        Raises:
            StoreUnavailableError: It could not be done before the deadline.
        """
        view = bytes_view(data)
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
        """Bytes ``start`` to ``end``, or ``expected`` of them where the content ends there."""
        data = bytearray()
        if content == EMPTY or start == end:
            return data
        deadline, tries = self._hub.deadline(key), 0
        while True:
            before = len(data)
            trouble: Exception | None = None
            access = self._access("read")  # out of the try: some of our errors are an OSError too
            try:
                self._stream(access, content, (start, end), data)
            except _ERRORS as exc:
                trouble = exc
            if len(data) >= expected:
                return data
            if len(data) > before:  # it is alive: the deadline is for standing still
                deadline, tries = self._hub.deadline(key), 0
            if not self._has_more(content, start + len(data), key):
                return data
            tries += 1
            self._pause(deadline, tries, trouble, key)

    def _stream(
        self, access: _Access, content: str, span: tuple[int, int], data: bytearray
    ) -> None:
        """Append to ``data`` what it lacks of a span."""
        start, end = span
        group = self._session("read").new_download_stream_group(**access.arguments())
        info = self._lib.XetFileInfo(content, end)
        stream = group.download_stream(info, start=start + len(data), end=end)
        for chunk in stream:
            data += chunk

    def _has_more(self, content: str, position: int, key: str) -> bool:
        """Whether a stream that ended at ``position`` should not have; True where nobody knows."""
        try:
            return self._measure(content, key) > position
        except StoreUnavailableError:
            return True

    def _measure(self, content: str, key: str) -> int:
        """How large a content is, by the storage's own account: one request, not to the Hub."""
        if content == EMPTY:
            return 0
        access = self._access("read")
        status, document = self._hub.ask(
            f"{access.endpoint}/v1/reconstructions/{content}", access.token
        )
        if status == 404:
            raise not_found(key, self._url)
        if status == 401:
            self._forget("read", access)
        try:
            return sum(term["unpacked_length"] for term in document["terms"])
        except (KeyError, TypeError) as exc:
            raise StoreUnavailableError(
                f"{self._url}: the storage answered {status}", key=key, url=self._url
            ) from exc

    def _upload(self, access: _Access, view: memoryview) -> str:
        commit = self._session("write").new_upload_commit(**access.arguments())
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
        if deadline.sleep(PAUSES.pause_s(tries - 1)):
            return
        said = str(trouble) if trouble else "the stream ended early"
        hint = "the disk is full: free some space" if "No space left" in said else ""
        raise StoreUnavailableError(
            f"object {key!r} in {self._url}: {said}", key=key, url=self._url, hint=hint
        ) from trouble

    def _access(self, kind: _Kind) -> _Access:
        """Return a token for reading or writing: the cached one, or a new one from the Hub."""
        with self._locks[kind]:
            held = self._held.get(kind)
            if held is None or time.time() >= held.good_until:
                reply = self._hub.call("GET", f"xet-{kind}-token", dict)
                held = self._held[kind] = _parse_access(parse_reply(reply, self._url), self._url)
            return held

    def _forget(self, kind: _Kind, access: _Access) -> None:
        with self._locks[kind]:
            if self._held.get(kind) is access:
                del self._held[kind]

    def _session(self, kind: _Kind) -> Any:  # noqa: ANN401 - hf_xet has no types
        """The session of this process: a fork takes none of its threads along."""
        which = (os.getpid(), kind, self._hub.deadline_s)
        with _sessions_lock:
            if which not in _sessions:
                _sessions[which] = self._lib.XetSession(self._config(kind))
            return _sessions[which]

    def _config(self, kind: _Kind) -> Any:  # noqa: ANN401
        """Few retries of its own, so that ours know of them; what the user set stays."""
        deadline_ms = round(self._hub.deadline_s * 1000)
        ours: dict[str, Any] = {
            "client.retry_max_attempts": 1,
            "client.retry_base_delay": "500ms",
            "client.retry_max_duration": f"{deadline_ms}ms",
        }
        if kind == "read":
            # A download cannot be aborted from outside. This bounds the pause between two reads: a
            # storage that drips holds one for longer than the deadline. For an upload it would be
            # too short: the time until the answer to 64 MiB counts, over however slow a line.
            ours["client.read_timeout"] = f"{max(500, deadline_ms // 2)}ms"
        unset = {
            name: value
            for name, value in ours.items()
            if f"HF_XET_{name.replace('.', '_').upper()}" not in os.environ
        }
        return self._lib.XetConfig().with_config(unset)


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
    """Abort an upload that stands still for too long: ``hf_xet`` itself waits for many minutes."""
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
