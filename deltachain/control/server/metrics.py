"""Prometheus metrics of a replica."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deltachain.replica.leader import Leader


class Figures(Collector):
    """Stateless collector of a leader's metrics."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        status, tally = self._leader.status(), self._leader.tally
        gauges = {
            "version": (status.version, "Proven version held; absent for none."),
            "head_version": (status.head, "Newest version seen."),
            "lag_versions": (status.lag_versions, "Versions behind the newest seen."),
            "ready": (status.ready, "Whether the replica is ready for requests."),
            "paused": (status.paused, "Whether generation is paused."),
            "pinned": (status.pinned, "Whether a rollback keeps the replica at its version."),
            "poisoned": (status.poisoned, "Whether the state of the weights is unknown."),
        }
        for name, (value, about) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"deltachain_{name}", about, value)
        counters = {
            "applies": (tally.applies, "Versions applied."),
            "failures": (tally.failures, "Failed polls, updates and rollbacks."),
            "fetched_bytes": (tally.nbytes, "Bytes fetched."),
            "written_elements": (tally.nnz, "Elements written."),
            "fetch_seconds": (tally.fetch_s, "Seconds of fetching."),
            "stage_seconds": (tally.stage_s, "Seconds of decoding and verification."),
            "swap_seconds": (tally.swap_s, "Seconds of writing."),
            "pause_seconds": (tally.pause_s, "Seconds without generation during swaps."),
        }
        for name, (total, about) in counters.items():
            yield CounterMetricFamily(f"deltachain_{name}", about, total)


def exposition(leader: Leader) -> bytes:
    """Return all metrics in the Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(Figures(leader))
    found: bytes = generate_latest(registry)
    return found
