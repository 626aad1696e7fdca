"""Metrics for Prometheus: figures of publishers, replicas, followers and mirrors, and their server.

The server needs the package ``prometheus_client``, which is imported on first use.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from socketserver import ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from typing_extensions import override

from deltachain.errors import ConfigError
from deltachain.redact import redacted_url
from deltachain.threads import Closeable, started
from deltachain.version import __version__

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


GAUGES: Final[Mapping[str, str]] = {
    "info": "Version of deltachain, engine or part of deltachain, chain; always 1.",
    "version": "Version held, committed or copied last.",
    "head_version": "Newest version seen or announced.",
    "lag_versions": "Versions behind the newest seen or announced.",
    "ready": "Whether it is ready for requests.",
    "paused": "Whether generation is paused.",
    "pinned": "Whether a rollback keeps it at its version.",
    "poisoned": "Whether its weights are unproven.",
    "last_look_timestamp_seconds": "Last answer of the store.",
    "last_apply_timestamp_seconds": "Last swap or copy of a version.",
    "commit_timestamp_seconds": "Commit of the version, by the publisher's clock.",
    "silence_seconds": "Time since the store answered a follower.",
    "phase_seconds": "Phase of the newest version.",
    "epoch": "Epoch of the publisher.",
    "changed_ratio": "Changed share of elements in the newest version.",
    "presence_timestamp_seconds": "Last write of its presence.",
    "left_out_payloads": "Payloads lost by a mirror's source.",
}
"""Metrics that may fall: what they mean, by name without ``deltachain_``."""

COUNTERS: Final[Mapping[str, str]] = {
    "applies": "Versions applied or copied.",
    "commits": "Versions committed.",
    "failures": "Failed polls, updates, rollbacks, commits and rounds of a mirror.",
    "fetched_bytes": "Bytes fetched.",
    "written_elements": "Elements written.",
    "fetch_seconds": "Fetching.",
    "stage_seconds": "Decoding and verification.",
    "swap_seconds": "Writing.",
    "pause_seconds": "Pauses of generation by swaps.",
    "published_bytes": "Objects of committed versions.",
    "changed_elements": "Elements changed in committed versions.",
    "diff_seconds": "Diffs, which block training.",
    "encode_seconds": "Encoding and uploading.",
    "upload_seconds": "Uploads under way.",
    "commit_seconds": "Commits.",
    "copied_objects": "Objects copied.",
    "copied_bytes": "Bytes copied.",
    "presence_failures": "Failed writes of its presence.",
    "store_requests": "Requests to the store, as its provider counts them.",
}
"""Metrics that only grow while a process lives, by name without ``deltachain_`` and ``_total``."""


@dataclass(frozen=True, slots=True)
class Figure:
    name: str  # name of the metric, in GAUGES or COUNTERS
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_counter(self) -> bool:
        return self.name in COUNTERS

    @property
    def about(self) -> str:
        return COUNTERS[self.name] if self.is_counter else GAUGES[self.name]


FigureSource: TypeAlias = Callable[[], Iterable[Figure]]  # from any thread


def figures(values: Mapping[str, float | None]) -> Iterator[Figure]:
    return (Figure(name, value) for name, value in values.items() if value is not None)


def info(*, engine: str, chain: str | None) -> Figure:
    labels = {"version": __version__, "engine": engine, "chain": chain or ""}
    return Figure("info", 1, labels)


def phases(seconds: Mapping[str, float]) -> Iterator[Figure]:
    return (Figure("phase_seconds", value, {"phase": name}) for name, value in seconds.items())


LOOPBACK: Final = "127.0.0.1"

_SILENCE_S: Final = 10.0  # seconds without a byte of a client after which its connection is closed
_REGISTERED: Final[list[Any]] = []  # by register_figures


class FigureCollector:
    """Collector of the figures of one source, for any Prometheus registry; keeps nothing."""

    def __init__(self, source: FigureSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for figure in self._source():
            if figure.name not in families:
                families[figure.name] = _family(figure)
            families[figure.name].add_metric(list(figure.labels.values()), figure.value)
        yield from families.values()

    def describe(self) -> Iterable[Metric]:
        """Name no metric ahead: which ones there are depends on the state of the source."""
        return ()


def _family(figure: Figure) -> CounterMetricFamily | GaugeMetricFamily:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

    family = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
    return family(f"deltachain_{figure.name}", figure.about, labels=list(figure.labels))


def exposition(source: FigureSource) -> bytes:
    from prometheus_client import generate_latest  # noqa: PLC0415 - an extra

    found: bytes = generate_latest(_registry(source))
    return found


def register_figures(source: FigureSource) -> None:
    """Show figures in the default registry of this process, instead of those registered before."""
    from prometheus_client import REGISTRY  # noqa: PLC0415 - an extra

    collector: Any = FigureCollector(source)  # a registry asks for no base class
    while _REGISTERED:
        with suppress(KeyError):  # others may have emptied the registry
            REGISTRY.unregister(_REGISTERED.pop())
    REGISTRY.register(collector)
    _REGISTERED.append(collector)


def _registry(source: FigureSource) -> CollectorRegistry:
    from prometheus_client import CollectorRegistry  # noqa: PLC0415 - an extra

    registry, collector = CollectorRegistry(), FigureCollector(source)
    registry.register(cast("Any", collector))  # a registry asks for no base class
    return registry


def parse_address(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(
            f"{redacted_url(text)!r} is no address to serve at",
            hint="give a port, 9095, or a host and a port, 0.0.0.0:9095",
        )
    return host.strip("[]") or LOOPBACK, int(port)


class MetricsServer(Closeable):
    """Server of ``/metrics``, ``/healthz`` and ``/readyz`` at its ``url``, in threads of its own.

    ``/readyz`` answers 503 and the reason unless the process is ready. No request needs a token,
    changes anything, or ends what is reported on.
    """

    def __init__(
        self, address: str, source: FigureSource, unready: Callable[[], str] = lambda: ""
    ) -> None:
        host, port = parse_address(address)
        try:
            from prometheus_client import make_wsgi_app  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as exc:
            raise ConfigError(
                "metrics need the package prometheus_client",
                hint="pip install 'deltachain[server]'",
            ) from exc
        app = partial(_answer, make_wsgi_app(_registry(partial(_all, source, unready))), unready)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server: type[WSGIServer] = type("_FamilyServer", (_Server,), {"address_family": family})
        try:
            self._server = make_server(host, port, app, server, _Request)
        except OSError as exc:
            raise ConfigError(
                f"metrics cannot be served at {host}:{port}: {exc.strerror or exc}",
                hint="name a free port, or 0 for any",
            ) from exc
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}"
        self._thread = Thread(
            target=self._server.serve_forever, args=(0.1,), name="deltachain-metrics", daemon=True
        )
        self._is_started = started(self._thread)
        if not self._is_started:
            self._server.server_close()
            raise ConfigError(
                "no thread is left to serve metrics", hint="let this process have more (ulimit -u)"
            )

    def close(self) -> None:
        if self._is_started:
            self._is_started = False
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread a request: one that hangs does not delay others, nor the end of the process."""

    daemon_threads = True
    block_on_close = False

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that leave in the middle of a request."""


def _all(source: FigureSource, unready: Callable[[], str]) -> Iterator[Figure]:
    yield from source()
    yield from figures({"ready": not unready()})


class _Request(WSGIRequestHandler):
    timeout = _SILENCE_S

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Log no request: a scrape every few seconds says nothing."""


def _answer(
    metrics: WSGIApplication,
    unready: Callable[[], str],
    environment: WSGIEnvironment,
    start: StartResponse,
) -> Iterable[bytes]:
    path = environment.get("PATH_INFO", "")
    if environment.get("REQUEST_METHOD") not in ("GET", "HEAD"):
        return _text(start, "405 Method Not Allowed", "only GET")
    if path == "/metrics":
        return metrics(environment, start)
    if path == "/healthz":
        return _text(start, "200 OK", "ok")
    if path == "/readyz":
        reason = unready()
        status = "503 Service Unavailable" if reason else "200 OK"
        return _text(start, status, f"not ready: {reason}" if reason else "ready")
    return _text(start, "404 Not Found", "there are /metrics, /healthz and /readyz")


def _text(start: StartResponse, status: str, body: str) -> Iterable[bytes]:
    content = f"{body}\n".encode()
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(content)))]
    start(status, headers)
    return [content]
