"""The fleet: followers, mirrors and newcomers, as processes of a simulation."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from simpy import Environment, Event

from deltachain.bench.reach.growth import Moment, Reading
from deltachain.bench.reach.link import Link
from deltachain.bench.reach.mirror_calls import MirrorCalls
from deltachain.bench.reach.settings import ModelSize, ReachConfig
from deltachain.chain.fetch import THREADS
from deltachain.chain.skips import READS
from deltachain.retry import between_polls

Steps = Generator[Event, Any, None]
"""A process of the simulation."""


@dataclass(slots=True)
class Traffic:
    """Requests and bytes of one kind of reader.

    Attributes:
        reads: Gets and heads.
        writes: Puts and lists.
        nbytes: Bytes read.
    """

    reads: float = 0.0
    writes: float = 0.0
    nbytes: int = 0

    def add(self, reading: Reading) -> None:
        """Add one reading."""
        self.reads += reading.requests
        self.nbytes += reading.nbytes


@dataclass(slots=True)
class Delivery:
    """What the simulation of one model saw.

    Attributes:
        waits: Seconds from the commit of a version until a follower has it, of each, by region.
        joins: Seconds from the start of a newcomer until it has the newest version.
        jumps: Updates of a follower over more than one version.
        seconds: Simulated time.
        followers: Traffic of all followers.
        newcomers: Traffic of all newcomers.
        mirrors: Traffic of all mirrors.
    """

    waits: list[list[float]]
    joins: list[float] = field(default_factory=list)
    jumps: int = 0
    seconds: float = 0.0
    followers: Traffic = field(default_factory=Traffic)
    newcomers: Traffic = field(default_factory=Traffic)
    mirrors: Traffic = field(default_factory=Traffic)


class Region:
    """One region: its store, and the newest sampled version there.

    Args:
        env: Environment of the simulation.
        config: Settings.
    """

    def __init__(self, env: Environment, config: ReachConfig) -> None:
        self.link = Link(env, rate=config.store, most=config.link)
        self.newest = -1
        self.changed = env.event()
        self._env = env

    def show(self, step: int) -> None:
        """Make a version visible."""
        self.newest = step
        self.changed.succeed()
        self.changed = self._env.event()


class SimulatedFleet:
    """All readers of one model, over sampled versions that follow one another.

    Polls that find nothing are counted, not simulated one by one.

    Args:
        config: Settings.
        model: The model.
        moments: The versions, and what readers ask for.
        calls: Requests of a mirror.
    """

    def __init__(
        self, config: ReachConfig, model: ModelSize, moments: Sequence[Moment], calls: MirrorCalls
    ) -> None:
        self._config, self._model, self._moments, self._calls = config, model, moments, calls
        self._env = Environment()
        self._random = random.Random(config.seed)  # noqa: S311 - no secret
        self._pauses = between_polls(config.poll_s)
        self._regions = [Region(self._env, config) for _ in range(config.regions)]
        self._committed: list[float] = []
        self._seen = Delivery(waits=[[] for _ in self._regions])

    def run(self) -> Delivery:
        """Simulate until every follower has the last version."""
        env = self._env
        env.process(self._publish())
        for region in self._regions[1:]:
            env.process(self._mirror(region))
        numbers = range(self._config.followers)
        readers = [env.process(self._follow(n % self._config.regions)) for n in numbers]
        env.process(self._arrive())
        env.run(until=env.all_of(readers))
        self._seen.seconds = env.now
        return self._seen

    def _publish(self) -> Steps:
        for step in range(len(self._moments)):
            yield self._env.timeout(self._model.step_s)
            self._committed.append(self._env.now)
            self._regions[0].show(step)

    def _follow(self, number: int) -> Steps:
        env, region, traffic = self._env, self._regions[number], self._seen.followers
        held, last = -1, len(self._moments) - 1
        while held < last:
            if region.newest <= held:
                polls = yield from self._wait(region, 1.0)
                traffic.reads += polls * self._moments[max(held, 0)].poll
            yield env.timeout(self._config.requests.draw(self._random, 1))
            found = region.newest
            readings = [moment.update for moment in self._moments[held + 1 : found + 1]]
            self._seen.jumps += len(readings) > 1
            reading = joined(readings)
            yield from self._fetch(region, reading, asked=1)
            traffic.add(reading)
            for step in range(held + 1, found + 1):
                self._seen.waits[number].append(env.now - self._committed[step])
            held = found

    def _arrive(self) -> Steps:
        """Let newcomers arrive at random."""
        hourly, number = self._config.newcomers, 0
        while hourly:
            yield self._env.timeout(self._random.expovariate(hourly / 3600))
            self._env.process(self._join(self._regions[number % len(self._regions)]))
            number += 1

    def _join(self, region: Region) -> Steps:
        start, reading = self._env.now, self._moments[max(region.newest, 0)].join
        self._seen.newcomers.add(reading)
        yield from self._fetch(region, reading, asked=0)
        self._seen.joins.append(self._env.now - start)

    def _mirror(self, region: Region) -> Steps:
        """Copy versions in order, each with all that leads to it."""
        source, config, traffic = self._regions[0], self._config, self._seen.mirrors
        for step, moment in enumerate(self._moments):
            if source.newest < step:
                polls = yield from self._wait(source, self._calls.poll_reads)
                traffic.reads += polls * self._calls.poll_reads
                traffic.writes += polls * self._calls.poll_writes
            rounds = round(self._calls.in_row) + ceil(len(moment.copied) / THREADS)
            more = config.region_s
            yield self._env.timeout(config.requests.draw(self._random, rounds, more))
            yield source.link.transfer(sum(moment.copied))
            last = moment.copied[-1] / config.link if moment.copied else 0.0
            yield self._env.timeout(last + config.requests.draw(self._random, 2))
            region.show(step)
            traffic.reads += self._calls.version_reads + len(moment.copied) - 1
            traffic.writes += self._calls.version_writes + len(moment.copied) - 1
            traffic.nbytes += sum(moment.copied) + moment.update.documents_nbytes

    def _wait(self, region: Region, requests: float) -> Generator[Event, Any, float]:
        """Wait for a change and the poll that finds it; return the number of polls before it."""
        start = self._env.now
        yield region.changed
        asked = requests * self._config.requests.draw(self._random, 1)
        every = self._pauses.pause_s(0) + asked
        polls = (self._env.now - start) / every
        yield self._env.timeout(self._random.random() * every)
        return polls

    def _fetch(self, region: Region, reading: Reading, *, asked: int) -> Steps:
        """Read documents and parts; ``asked`` requests were made already."""
        rounds = max(0, reading.in_row - asked) + ceil(len(reading.parts) / THREADS)
        if not asked:  # what a newcomer's threads read comes before its parts
            rounds += ceil(reading.beside / READS)
        yield self._env.timeout(self._config.requests.draw(self._random, rounds))
        yield region.link.transfer(reading.nbytes)


def joined(readings: Sequence[Reading]) -> Reading:
    """Return the reading of several versions in one plan."""
    return Reading(
        in_row=sum(reading.in_row for reading in readings),
        beside=max(reading.beside for reading in readings),
        documents_nbytes=sum(reading.documents_nbytes for reading in readings),
        parts=tuple(part for reading in readings for part in reading.parts),
        edges=sum(reading.edges for reading in readings),
    )
