"""Metrics: figures in Prometheus' format, and the server of sidecars and publishers."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deltachain.errors import ConfigError
from deltachain.figures import Figure, figures, info, phases
from deltachain.metrics import MetricsServer, exposition, parse_address, register_figures


def shown() -> Iterator[Figure]:
    yield info(engine="fake/1.0", chain="c")
    yield from figures({"version": 7, "lag_versions": None, "applies": 3})
    yield from phases({"fetch": 0.5, "swap": 0.25})


def samples(text: str) -> dict[tuple[str, str], float]:
    """Value of every sample, by its name, and its chain or phase."""
    return {
        (one.name, one.labels.get("chain") or one.labels.get("phase", "")): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_figures_are_what_prometheus_reads() -> None:
    found = samples(exposition(shown).decode())
    assert (found["deltachain_version", ""], found["deltachain_applies_total", ""]) == (7, 3)
    assert (found["deltachain_info", "c"], found["deltachain_phase_seconds", "fetch"]) == (1, 0.5)
    assert found["deltachain_phase_seconds", "swap"] == 0.25
    assert not [name for name, _ in found if "lag" in name]


def test_the_registry_of_the_process_shows_the_last_source() -> None:
    register_figures(shown)
    register_figures(lambda: figures({"version": 8}))
    found = samples(generate_latest(REGISTRY).decode())
    assert found["deltachain_version", ""] == 8
    assert ("deltachain_info", "c") not in found


def test_the_server_answers_scrapes_and_probes() -> None:
    reason = ""
    with MetricsServer("0", shown, lambda: reason) as server, httpx.Client() as client:
        answer = client.get(f"{server.url}/metrics")
        assert samples(answer.text)["deltachain_version", ""] == 7
        assert samples(answer.text)["deltachain_ready", ""] == 1
        assert client.get(f"{server.url}/healthz").text == "ok\n"
        assert client.get(f"{server.url}/readyz").status_code == 200
        reason = "its store has not answered for 7 s"
        text = client.get(f"{server.url}/metrics").text
        assert samples(text)["deltachain_ready", ""] == 0
        refused = client.get(f"{server.url}/readyz")
        assert (refused.status_code, refused.text) == (503, f"not ready: {reason}\n")
        assert client.get(f"{server.url}/healthz").status_code == 200
        assert client.get(f"{server.url}/").status_code == 404
        assert client.post(f"{server.url}/metrics").status_code == 405
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/healthz")
    server.close()


def test_a_failing_source_and_silent_clients_do_not_end_the_server() -> None:
    def failing() -> Iterator[Figure]:
        raise RuntimeError("no figure")

    with MetricsServer("0", failing) as server:
        port = httpx.URL(server.url).port or 0
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        silent[0].sendall(b"\xff\xfe nothing that HTTP knows\r\n\r\n")
        silent[1].sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 100_000)
        assert httpx.get(f"{server.url}/metrics").status_code == 500
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        for one in silent:
            one.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9095", ("127.0.0.1", 9095)),
        (" 0 ", ("127.0.0.1", 0)),
        ("0.0.0.0:9095", ("0.0.0.0", 9095)),  # noqa: S104 - only parsed
        ("[::1]:9095", ("::1", 9095)),
        (":9095", ("127.0.0.1", 9095)),
    ],
)
def test_an_address_is_a_port_or_a_host_and_a_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "host", "host:", "70000", "-1", "host:x", "٣", "1.5"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no address to serve at") as caught:
        parse_address(text)
    assert "9095" in caught.value.hint


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_taken_port_is_named(host: str) -> None:
    with MetricsServer(f"{host}:0", shown) as server:
        port = httpx.URL(server.url).port
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        with pytest.raises(ConfigError, match=f"cannot be served at .*:{port}") as caught:
            MetricsServer(f"{host}:{port}", shown)
        assert "free port" in caught.value.hint
