"""HTTP client of one replica, for any engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
from typing_extensions import override

from deltachain.control.client.http import Http, bearer, read, secret
from deltachain.control.schemas import PREFIXES, TOKEN_HEADER, Detail, Ready, RefusedReply
from deltachain.errors import ControlPlaneError
from deltachain.status import Status
from deltachain.threads import Closeable

if TYPE_CHECKING:  # imports numpy, which `deltachain fleet` does without
    from deltachain.types import Version

_T = TypeVar("_T")


class ReplicaClient(Closeable):
    """HTTP client of a vLLM or SGLang server that follows a chain.

    Calls are idempotent: a version that is held already is not applied again. Thread-safe.

    Args:
        url: Address of the server.
        token: The server's ``DELTACHAIN_TOKEN``, or a file of tokens that is read again when it
            changes; if the server refuses the first one, the next one is tried. Empty for none.
        key: The engine's own API key, or a file in the same way; empty for none.
        timeout_s: Timeout of a request, in seconds; a large update takes long.

    Attributes:
        url: Address of the server.

    Raises:
        ConfigError: ``url`` is invalid, ``token`` or ``key`` cannot be sent in a header, or a file
            cannot be read.
    """

    def __init__(
        self, url: str, *, token: str | Path = "", key: str | Path = "", timeout_s: float = 600.0
    ) -> None:
        self._keys, self._tokens = secret(key, "server's API key"), secret(token, "token")
        self._http = Http(url, self._credentials, timeout_s=timeout_s)
        self.url = self._http.url
        self._prefix = ""

    def status(self) -> Status:
        """Return the version the replica holds, and its health.

        Raises:
            ControlPlaneError: The server did not answer, or refused; the same for all methods.
        """
        return self._ask("GET", "status", Status)

    def ready(self) -> Ready:
        """Return whether the replica is ready for requests, and the reason if not."""
        return self._ask("GET", "ready", Ready)

    def metrics(self) -> str:
        """Return metrics in the Prometheus text format."""
        return self._send("GET", "metrics", None).text

    def stage(self, version: Version | None = None) -> Status:
        """Fetch and verify a version while the engine generates."""
        return self._tell("stage", version)

    def update(self, version: Version | None = None, *, manifest: str = "") -> Status:
        """Update to a version or to the head; return once it is held.

        Args:
            version: The version; the head if ``None``.
            manifest: Digest of this version's manifest. A replica that holds a later version of the
                same history then succeeds as well.
        """
        return self._tell("update", version, manifest)

    def rollback(self, version: Version | None = None) -> Status:
        """Go back to a version, the previous one by default, and stay there until ``release``."""
        return self._tell("rollback", version)

    def release(self) -> Status:
        """Unpin the replica after a rollback, so that it follows the head again."""
        return self._tell("release")

    def pause(self) -> Status:
        """Stop generation until ``resume``."""
        return self._tell("pause")

    def resume(self) -> Status:
        """Resume generation."""
        return self._tell("resume")

    def scrub(self) -> Status:
        """Verify the state digest of the live weights."""
        return self._tell("scrub")

    @override
    def close(self) -> None:
        """Give connections back. Closing twice is allowed."""
        self._http.close()

    def _credentials(self) -> Iterator[Mapping[str, str]]:
        for key, token in product(self._keys.current or ("",), self._tokens.current or ("",)):
            yield bearer(key or token) | ({TOKEN_HEADER: token} if token else {})

    def _tell(self, route: str, version: Version | None = None, manifest: str = "") -> Status:
        body: dict[str, Any] = {} if version is None else {"version": version}
        body |= {"manifest": manifest} if manifest else {}
        return self._ask("POST", route, Status, body)

    def _ask(
        self, method: str, route: str, kind: type[_T], body: dict[str, Any] | None = None
    ) -> _T:
        found = read(self._send(method, route, body), kind)
        if found is None:
            raise ControlPlaneError(f"{self.url}: unexpected response body from {route}")
        return found

    def _send(self, method: str, route: str, body: dict[str, Any] | None) -> httpx.Response:
        for prefix in [self._prefix] if self._prefix else PREFIXES:
            answer = self._http.request(method, f"{prefix}/{route}", body)
            if answer.status_code != httpx.codes.NOT_FOUND:
                if answer.status_code != httpx.codes.UNAUTHORIZED:
                    self._prefix = prefix  # some servers ask for a key before they look for a route
                break
        if answer.is_success or (route == "ready" and read(answer, Ready) is not None):
            return answer
        raise self._refusal(answer)

    def _refusal(self, answer: httpx.Response) -> ControlPlaneError:
        code = answer.status_code
        if code == httpx.codes.NOT_FOUND:
            return ControlPlaneError(
                f"{self.url} has no routes of deltachain",
                hint="start the engine as vllm_ext/README.md or sglang_ext/README.md says",
            )
        refused, detail = read(answer, RefusedReply), read(answer, Detail)
        if refused:
            error = refused.error
            message = f"{self.url}: {error.type}: {error.message}"
            return ControlPlaneError(message, refusal=error.type, hint=error.hint)
        hint = "give the server's DELTACHAIN_TOKEN" if code in (401, 403) else ""
        said = detail.detail if detail else answer.text[:300]
        return ControlPlaneError(f"{self.url} answered {code}: {said}", hint=hint)
