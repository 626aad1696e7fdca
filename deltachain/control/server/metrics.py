"""A replica's figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deltachain.replica.leader import Leader


class Figures(Collector):
    """Reads a leader when it is asked; keeps nothing of its own."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def collect(self) -> Iterator[Metric]:
        """Every figure."""
        status, tally = self._leader.status(), self._leader.tally
        gauges = {
            "version": (status.version, "Version held; absent for nothing that can be proven."),
            "head_version": (status.head, "Newest version seen."),
            "lag_versions": (status.lag_versions, "Versions behind the newest seen."),
            "ready": (status.ready, "Whether it should be sent requests."),
            "paused": (status.paused, "Whether somebody paused it."),
            "pinned": (status.pinned, "Whether a rollback keeps it where it is."),
            "poisoned": (status.poisoned, "Whether it cannot prove what it holds."),
        }
        for name, (value, about) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"deltachain_{name}", about, value)
        counters = {
            "applies": (tally.applies, "Versions applied."),
            "failures": (tally.failures, "Looks, updates and rollbacks that failed."),
            "fetched_bytes": (tally.nbytes, "Bytes fetched."),
            "written_elements": (tally.nnz, "Elements written."),
            "fetch_seconds": (tally.fetch_s, "Seconds of fetching."),
            "stage_seconds": (tally.stage_s, "Seconds of decoding and proving."),
            "swap_seconds": (tally.swap_s, "Seconds of writing."),
            "pause_seconds": (tally.pause_s, "Seconds that the engine generated nothing."),
        }
        for name, (total, about) in counters.items():
            yield CounterMetricFamily(f"deltachain_{name}", about, total)


def exposition(leader: Leader) -> bytes:
    """All figures in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(Figures(leader))
    found: bytes = generate_latest(registry)
    return found
