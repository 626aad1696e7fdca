"""Settings of a simulation: the models, the fleet, and what requests take."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from deltachain.errors import ConfigError

SHARES: Final = {1: 0.0105, 8: 0.0409, 64: 0.1146, 512: 0.2612}
"""Size of a delta, and of skips over 8, 64 and 512 versions, as shares of an anchor: measured on
2.1 M parameters of which 1.08 % change in a version (docs/long-life.md)."""

DENSITY: Final = 0.0108
"""Share of the elements that change in a version of that measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model in bf16, and how often it is published.

    Attributes:
        name: Its name in tables.
        numel: Number of its elements.
        step_s: Seconds between two versions.
    """

    name: str
    numel: int
    step_s: float

    @property
    def nbytes(self) -> int:
        """Size of all weights, in bytes."""
        return 2 * self.numel


MODELS: Final = (
    ModelSize(name="8b", numel=8_000_000_000, step_s=60),
    ModelSize(name="235b", numel=235_000_000_000, step_s=180),
    ModelSize(name="1t", numel=1_000_000_000_000, step_s=300),
)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds of small requests within a region, from which each request draws one.

    Raises:
        ConfigError: There is none, or one is negative.
    """

    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples or min(self.samples) < 0:
            raise ConfigError("request times must be zero or more seconds, one at least")

    def draw(self, chosen: random.Random, count: int, more_s: float = 0.0) -> float:
        """Return the seconds of requests one after another.

        Args:
            chosen: Source of random numbers.
            count: Number of requests.
            more_s: Seconds that each takes longer, as one to another region does.
        """
        return sum(chosen.choices(self.samples, k=count)) + count * more_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachConfig:
    """Settings of a simulation.

    Attributes:
        models: Models, simulated one after another.
        followers: Number of followers, in equal shares a region.
        regions: Number of regions; the first has the chain, each other one a mirror.
        versions: Number of versions of the chain.
        keep_last: Newest versions that pruning keeps.
        steps: Versions whose delivery is simulated, drawn at random.
        newcomers: Number of newcomers an hour, in all regions together.
        requests: Seconds of small requests within a region.
        region_s: Seconds that a request to another region takes longer.
        link_gbps: Link of each follower, newcomer and mirror, in Gbit/s.
        store_gbps: What the store of one region sends at most, in Gbit/s.
        poll_s: Seconds between two polls, on average.
        seed: Seed of all random numbers.

    Raises:
        ConfigError: A number is out of range.
    """

    models: tuple[ModelSize, ...] = MODELS
    followers: int = 1000
    regions: int = 3
    versions: int = 10_000
    keep_last: int = 1024
    steps: int = 20
    newcomers: float = 60.0
    requests: RequestTimes = field(default_factory=lambda: RequestTimes((0.03,)))
    region_s: float = 0.08
    link_gbps: float = 10.0
    store_gbps: float = 1000.0
    poll_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.followers, self.regions, self.versions - 1, self.keep_last, self.steps)
        rates = (self.link_gbps, self.store_gbps, self.poll_s)
        if not self.models or min(counts) < 1 or min(rates) <= 0:
            raise ConfigError(
                "a simulation needs a model, a follower, a region, two versions and links",
                hint="give numbers above zero",
            )
        if min(self.newcomers, self.region_s) < 0:
            raise ConfigError("newcomers and seconds to a region must be zero or more")

    @property
    def link(self) -> float:
        """Bytes a second of one follower's link."""
        return self.link_gbps * 1e9 / 8

    @property
    def store(self) -> float:
        """Bytes a second that the store of one region sends at most."""
        return self.store_gbps * 1e9 / 8

    def assumptions(self) -> tuple[str, ...]:
        """Return what the figures rest on, a sentence each."""
        times = sorted(self.requests.samples)
        return (
            f"{100 * DENSITY:.2f} % of the elements change in a version; sizes of deltas and skips "
            "are shares of an anchor that were measured on 2.1 M parameters.",
            f"A small request takes {1e3 * times[len(times) // 2]:.1f} ms within a region "
            f"(median of {len(times)}), {1e3 * self.region_s:g} ms more to another region.",
            f"Each follower, newcomer and mirror has a link of {self.link_gbps:g} Gbit/s; the "
            f"store of a region sends {self.store_gbps:g} Gbit/s at most, in equal shares.",
            f"Followers and mirrors poll every {self.poll_s:g} s on average and never fail; a "
            "follower is one host, and has a version when its last byte is there.",
            f"A maintainer keeps up; the newest {self.keep_last:,} versions are kept.",
            f"Delivery is simulated for {self.steps} of {self.versions:,} versions at random.",
            "Limits on requests, such as the Hub's, are left out; so are decoding and swapping.",
            "Prices are public list prices. Elsewhere: every byte to a reader leaves the provider. "
            "In the regions: only the copies of mirrors do.",
        )

    def as_json(self) -> dict[str, Any]:
        """Return all settings as JSON values."""
        return asdict(self)
