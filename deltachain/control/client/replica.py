"""One replica, asked over HTTP, whichever its engine."""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
from typing_extensions import override

from deltachain.closeable import Closeable
from deltachain.control.client.http import Http, bearer, read, secret
from deltachain.control.schemas import PREFIXES, TOKEN_HEADER, Detail, Ready, RefusedReply
from deltachain.errors import ControlPlaneError
from deltachain.replica.status import ReplicaStatus
from deltachain.types import Version

_T = TypeVar("_T")


class ReplicaClient(Closeable):
    """Asks a vLLM or SGLang server that follows a chain; see the routes for what each call does.

    Every call is allowed again: a version that is held already is not applied twice. Calls may come
    from several threads.

    Args:
        url: Of the server.
        token: Its ``DELTACHAIN_TOKEN``.
        key: The engine's own API key, where it has one.
        timeout_s: Longest wait for an answer: an update of much takes long.

    Attributes:
        url: As given.

    Raises:
        ConfigError: That is no address, or no header can carry the token.
    """

    def __init__(
        self, url: str, *, token: str = "", key: str = "", timeout_s: float = 600.0
    ) -> None:
        key, token = secret(key, "server's API key"), secret(token, "token")
        headers = bearer(key or token) | ({TOKEN_HEADER: token} if token else {})
        self._http = Http(url, headers, timeout_s=timeout_s)
        self.url = self._http.url
        self._prefix = ""

    def status(self) -> ReplicaStatus:
        """What the replica holds, and how.

        Raises:
            ControlPlaneError: It did not answer, or refused; so does every call here.
        """
        return self._ask("GET", "status", ReplicaStatus)

    def ready(self) -> Ready:
        """Whether it should be sent requests, and why not."""
        return self._ask("GET", "ready", Ready)

    def metrics(self) -> str:
        """Its figures, in the text format of Prometheus."""
        return self._send("GET", "metrics", None).text

    def stage(self, version: Version | None = None) -> ReplicaStatus:
        """Let it fetch and prove a version while it generates."""
        return self._tell("stage", version)

    def update(self, version: Version | None = None, *, manifest: str = "") -> ReplicaStatus:
        """Bring it to a version, or to the head; answers when it is there.

        Args:
            version: Which; the head when not given.
            manifest: The digest of that version's manifest: a replica that holds a later version
                then answers as well, if both are in its store.
        """
        return self._tell("update", version, manifest)

    def rollback(self, version: Version | None = None) -> ReplicaStatus:
        """Bring it back to a version, or the one before, and keep it there."""
        return self._tell("rollback", version)

    def release(self) -> ReplicaStatus:
        """Let it follow the head again."""
        return self._tell("release")

    def pause(self) -> ReplicaStatus:
        """Let it generate nothing."""
        return self._tell("pause")

    def resume(self) -> ReplicaStatus:
        """Let it generate again."""
        return self._tell("resume")

    def scrub(self) -> ReplicaStatus:
        """Let it look whether somebody else wrote to its weights."""
        return self._tell("scrub")

    @override
    def close(self) -> None:
        """Give connections back. Closing twice is allowed."""
        self._http.close()

    def _tell(
        self, route: str, version: Version | None = None, manifest: str = ""
    ) -> ReplicaStatus:
        body: dict[str, Any] = {} if version is None else {"version": version}
        body |= {"manifest": manifest} if manifest else {}
        return self._ask("POST", route, ReplicaStatus, body)

    def _ask(
        self, method: str, route: str, kind: type[_T], body: dict[str, Any] | None = None
    ) -> _T:
        found = read(self._send(method, route, body), kind)
        if found is None:
            raise ControlPlaneError(f"{self.url} answered {route} with something else")
        return found

    def _send(self, method: str, route: str, body: dict[str, Any] | None) -> httpx.Response:
        for prefix in [self._prefix] if self._prefix else PREFIXES:
            answer = self._http.request(method, f"{prefix}/{route}", body)
            if answer.status_code != httpx.codes.NOT_FOUND:
                self._prefix = prefix
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
