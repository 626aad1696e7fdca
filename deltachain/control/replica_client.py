"""HTTP client of one replica, for any engine."""

import os
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import httpx
import msgspec
from typing_extensions import override

from deltachain.errors import ConfigError, ControlPlaneError
from deltachain.format.documents import decode
from deltachain.redact import redacted_url
from deltachain.status import Status
from deltachain.threads import Closeable
from deltachain.tls import TlsFiles
from deltachain.tokens import Tokens
from deltachain.types import Version

from .schemas import PREFIXES, TOKEN_HEADER, Detail, Ready, RefusedReply

CONNECT_S: Final = 5.0
KEEPALIVE_S: Final = 2.0
"""Seconds for which an idle connection is reused.

uvicorn, and with it vLLM and SGLang, closes one after 5 s; a request sent at that moment is lost.
"""
LARGEST: Final = 4 << 20  # size limit of a response, in bytes


Credentials: TypeAlias = Callable[[], Iterable[Mapping[str, str]]]
"""Function that returns the headers of each way to identify, the preferred one first."""

DIRECT: Final = ("localhost", "127.0.0.1", "[::1]")
"""Hosts that no proxy can reach for this machine."""


class Http:
    """HTTP client of one server; thread-safe.

    Proxies are those of ``HTTP_PROXY``, ``HTTPS_PROXY``, ``ALL_PROXY`` and ``NO_PROXY``, except for
    the loopback interface. Certificates and keys for TLS are those of :class:`TlsFiles`.
    """

    def __init__(self, url: str, credentials: Credentials, *, timeout_s: float) -> None:
        self._address = url.rstrip("/")
        self.url = redacted_url(self._address)
        try:
            parsed = httpx.URL(self._address)
        except httpx.InvalidURL:
            parsed = httpx.URL()
        is_http = parsed.scheme in ("http", "https") and parsed.host
        if not is_http or parsed.query or parsed.fragment:
            raise ConfigError(
                f"{self.url!r} is not a server address",
                hint="use http://HOST:PORT, without a query",
            )
        self._credentials, self._timeout_s = credentials, timeout_s
        self._client = make_client(headers={"accept-encoding": "identity"})

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """Send a request and read the whole response, whatever its status.

        A shorter ``timeout_s`` than the client's holds for this request.
        """
        for headers in self._credentials():
            answer = self._send(method, path, body, headers, timeout_s or self._timeout_s)
            if answer.status_code != httpx.codes.UNAUTHORIZED:
                break
        return answer

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> httpx.Response:
        content, url, until = b"", self._address + path, time.monotonic() + timeout_s
        limit = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S))
        try:
            with self._client.stream(
                method, url, json=body, headers=headers, timeout=limit
            ) as answer:
                for chunk in answer.iter_raw():
                    content += chunk
                    if len(content) > LARGEST:
                        raise ControlPlaneError(f"{self.url}: response above {LARGEST} bytes")
                    if time.monotonic() > until:  # httpx limits each read, not their sum
                        raise ControlPlaneError(
                            f"{self.url} did not end its answer in {timeout_s:g} s", hint=UNREACHED
                        )
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            is_ours = isinstance(exc, httpx.LocalProtocolError | httpx.InvalidURL)  # has a header
            what = type(exc).__name__ if is_ours else str(exc) or type(exc).__name__
            hint = UNTRUSTED if is_untrusted(exc) else UNREACHED
            raise ControlPlaneError(f"{self.url} did not answer: {what}", hint=hint) from exc
        return httpx.Response(answer.status_code, content=content)

    def parsed(self, answer: httpx.Response, kind: "type[_T]", route: str) -> "_T":
        found = read(answer, kind)
        if found is None:
            raise ControlPlaneError(f"{self.url}: unexpected response body from {route}")
        return found

    def close(self) -> None:
        self._client.close()


UNREACHED: Final = "see whether it runs, and can be reached from here; its log may say more"
"""Hint for a server that does not answer."""

UNTRUSTED: Final = (
    "name the certificate of the CA that signed the server's in SSL_CERT_FILE, with all others "
    "that this program needs"
)
"""Hint for a server whose certificate is signed by an unknown CA."""


def make_client(**arguments: Any) -> httpx.Client:  # noqa: ANN401 - as httpx takes them
    """Return an HTTP client with the proxies and the TLS of the environment."""
    context = TlsFiles.of(os.environ).context()
    limits = httpx.Limits(keepalive_expiry=KEEPALIVE_S)
    local = {f"all://{host}": httpx.HTTPTransport(verify=context, limits=limits) for host in DIRECT}
    try:
        return httpx.Client(verify=context, limits=limits, mounts=local, **arguments)
    except (ValueError, ImportError, httpx.InvalidURL) as exc:
        why = str(exc) if isinstance(exc, ImportError) else "it is no URL of a proxy"
        raise ConfigError(
            f"a proxy of the environment is invalid: {why}",
            hint="correct HTTP_PROXY, HTTPS_PROXY or ALL_PROXY, such as http://proxy:3128",
        ) from None  # the cause has the URL, and with it a password


def is_untrusted(exc: BaseException | None) -> bool:
    while exc is not None:
        if isinstance(exc, ssl.SSLCertVerificationError):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


def secret(given: str | Path, name: str) -> Tokens:
    """Return tokens or keys, after a check that a header can carry them."""
    tokens = Tokens(given)
    if not all(token.isascii() and token.isprintable() for token in tokens.current):
        raise ConfigError(f"the {name} has characters that are invalid in an HTTP header")
    return tokens


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def read(answer: httpx.Response, kind: "type[_T]") -> "_T | None":
    """Parse the JSON of a response; ``None`` if it is not of this type."""
    try:
        return decode(answer.content, kind)
    except (msgspec.DecodeError, RecursionError):
        return None


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
        return self._http.parsed(self._send(method, route, body), kind, route)

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
