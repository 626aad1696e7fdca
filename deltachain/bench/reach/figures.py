"""Figures of a simulation: traffic and dollars a step, delays, newcomers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import Any

from deltachain.bench.reach.edge_sizes import edge_nbytes
from deltachain.bench.reach.fleet import Delivery, Traffic
from deltachain.bench.reach.growth import Grown
from deltachain.bench.reach.settings import ModelSize, ReachConfig
from deltachain.maintain.prices import LIST_PRICES


@dataclass(frozen=True, slots=True, kw_only=True)
class PerStep:
    """Traffic for one version.

    Attributes:
        reads: Gets and heads of all readers, publisher and maintainer.
        writes: Puts and lists of all.
        followers_nbytes: Bytes to followers.
        newcomers_nbytes: Bytes to newcomers.
        mirrors_nbytes: Bytes to mirrors.
    """

    reads: float
    writes: float
    followers_nbytes: float
    newcomers_nbytes: float
    mirrors_nbytes: float

    @property
    def egress_nbytes(self) -> float:
        """Bytes to all readers."""
        return self.followers_nbytes + self.newcomers_nbytes + self.mirrors_nbytes


def per_step(config: ReachConfig, grown: Grown, seen: Delivery) -> PerStep:
    """Return the mean traffic of a version.

    Mirrors copy everything that publisher and maintainer put, sampled or not.
    """
    steps, mirrors = len(grown.moments), config.regions - 1
    objects, copied = grown.objects / config.versions, grown.put_nbytes / config.versions
    sampled = mean(len(moment.copied) for moment in grown.moments)
    more = mirrors * (objects - sampled)
    readers: Sequence[Traffic] = (seen.followers, seen.newcomers, seen.mirrors)
    return PerStep(
        reads=sum(one.reads for one in readers) / steps
        + more
        + grown.writing.reads / config.versions,
        writes=sum(one.writes for one in readers) / steps
        + more
        + grown.writing.writes / config.versions,
        followers_nbytes=seen.followers.nbytes / steps,
        newcomers_nbytes=seen.newcomers.nbytes / steps,
        mirrors_nbytes=mirrors * copied,
    )


def dollars(config: ReachConfig, step: PerStep, kept_nbytes: int) -> list[dict[str, Any]]:
    """Return the price of a step and of a month's storage in all regions, by provider."""
    rows = []
    for prices in LIST_PRICES:
        writing = prices.writing(round(step.writes))
        away = prices.reading(round(step.egress_nbytes), round(step.reads))
        inside = prices.reading(round(step.mirrors_nbytes), round(step.reads))
        rows.append(
            {
                "provider": prices.provider,
                "step_elsewhere": away + writing,
                "step_in_regions": inside + writing,
                "storage_month": config.regions * prices.storage(kept_nbytes),
            }
        )
    return rows


def middle_and_tail(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return median and 99th percentile; ``None`` for both without values."""
    if len(seconds) < 2:
        only = seconds[0] if seconds else None
        return {"median": only, "p99": only}
    return {"median": median(seconds), "p99": quantiles(seconds, n=100, method="inclusive")[-1]}


def percentiles(seconds: Sequence[float]) -> list[float]:
    """Return the 1st to the 99th percentile; nothing of fewer than two values."""
    return quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else []


def most_newcomers(config: ReachConfig, model: ModelSize, step: PerStep, join_nbytes: float) -> int:
    """Return how many newcomers an hour the stores can send to, beside the followers."""
    left = config.regions * config.store - step.followers_nbytes / model.step_s
    return max(0, int(3600 * left / join_nbytes))


def of_model(config: ReachConfig, model: ModelSize, grown: Grown, seen: Delivery) -> dict[str, Any]:
    """Return all figures of one model as JSON values."""
    step = per_step(config, grown, seen)
    joins = [moment.join for moment in grown.moments]
    join_nbytes = mean(join.nbytes for join in joins)
    waits = [wait for region in seen.waits for wait in region]
    return {
        "model": model.name,
        "numel": model.numel,
        "step_s": model.step_s,
        "delta_nbytes": median(moment.update.nbytes for moment in grown.moments),
        "anchor": {
            "nbytes": edge_nbytes(model, 0),
            "versions": config.versions / grown.anchors,
            "copy_s": edge_nbytes(model, 0) / config.link,
        },
        "kept_nbytes": grown.kept_nbytes,
        "requests_a_step": {"reads": step.reads, "writes": step.writes},
        "requests_a_second": (step.reads + step.writes) / model.step_s,
        "egress_nbytes_a_step": {
            "all": step.egress_nbytes,
            "followers": step.followers_nbytes,
            "newcomers": step.newcomers_nbytes,
            "mirrors": step.mirrors_nbytes,
        },
        "dollars": dollars(config, step, grown.kept_nbytes),
        "follower_s": middle_and_tail(waits),
        "follower_s_by_region": [middle_and_tail(region) for region in seen.waits],
        "follower_s_percentiles": [percentiles(region) for region in seen.waits],
        "versions_at_once": seen.jumps,
        "newcomer": {
            "nbytes": join_nbytes,
            "requests": mean(join.requests for join in joins),
            "edges": median(join.edges for join in joins),
            "joined": len(seen.joins),
            "seconds": middle_and_tail(seen.joins),
            "most_an_hour": most_newcomers(config, model, step, join_nbytes),
        },
    }
