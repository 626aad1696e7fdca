"""Maintainers of different rules that are stopped before any step: no acknowledged tag is lost.

The real code runs under every schedule of two stops: one party is stopped before a step, another
one runs meanwhile and is stopped itself while a tag is set, and time passes or not at each stop.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Final, NamedTuple, cast

import pytest
from typing_extensions import override

from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.errors import AlreadyExistsError, BrokenChainError
from deltachain.format.keys import PAYLOADS
from deltachain.maintain import KeepRule, Pruner
from deltachain.maintain.survey import Survey
from deltachain.store import ObjectInfo
from deltachain.types import Buffer
from tests.support.backup import objects_of, put_back
from tests.support.faults import FaultyStore
from tests.support.fetch import fetch
from tests.unit.maintain.grown import SPECS, Clock, grow_sixty

GRACE_S: Final = 100.0
TAGGED: Final = 12
"""A version that the narrow rule does not keep."""


class Stopped(FaultyStore):
    """A store that calls a function before the n-th step of its user that others can notice."""

    def __init__(self, inner: Clock, at: int, meanwhile: Callable[[], object]) -> None:
        super().__init__(inner)
        self._left, self._meanwhile = at, meanwhile
        self.reached, self._deleted = False, 0

    def step(self) -> None:
        self._left -= 1
        if self._left == -1:
            self.reached = True
            self._meanwhile()

    @override
    def put(self, key: str, data: Buffer) -> str:
        self.step()
        return super().put(key, data)

    @override
    def put_if_absent(self, key: str, data: Buffer) -> None:
        self.step()
        super().put_if_absent(key, data)

    @override
    def delete(self, key: str) -> None:
        self._deleted += 1
        if self._deleted == 1:  # later ones are the same step: nothing is asked between them
            self.step()
        super().delete(key)

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if prefix.startswith(("tags/", PAYLOADS[0])):
            self.step()
        return super().list(prefix)

    @override
    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        wanted = [*keys]
        if any(key.startswith(("prunes/", *PAYLOADS)) for key in wanted):
            self.step()
        return super().find_all(wanted)


class Party(NamedTuple):
    """A maintainer with a rule of its own."""

    last: int

    def run(self, store: FaultyStore | Clock) -> None:
        pruner = Pruner(Survey(Chain.open(store)), KeepRule(last=self.last), grace_s=GRACE_S)
        try:
            pruner.run()
        except AlreadyExistsError:  # the next round decides again
            return


NARROW, WIDE = Party(17), Party(1000)
NEVER: Final = 10**9


class World:
    """A chain whose store, clock and prune records begin anew for each schedule."""

    def __init__(self) -> None:
        self.grown = grow_sixty()
        self.store = cast("Clock", self.grown.store)
        NARROW.run(self.store)
        self.objects = objects_of(self.store)
        self.begin = self.store.now

    def reset(self, late: float) -> None:
        put_back(self.store, self.objects)
        self.store.now = self.begin + late

    def tag(self, store: FaultyStore | Clock | None = None) -> bool:
        """Set a tag; return whether that was acknowledged."""
        chain = Chain.open(store or self.store)
        try:
            tags.set_(chain, "kept", chain.read(TAGGED), time=0.0)
        except BrokenChainError:
            return False
        return True

    def wait(self, seconds: float) -> None:
        self.store.now += seconds

    def check(self) -> None:
        """Let everybody run on for a while; what the tag names is there."""
        for party in (NARROW, WIDE, NARROW):
            party.run(self.store)
            self.wait(GRACE_S + 1)
        chain = Chain.open(self.store)
        fetched = fetch(chain, chain.plan(None, chain.read(TAGGED)))
        for spec in SPECS:
            expected = self.grown.bits[TAGGED][spec.name]
            assert (fetched.read(spec.name).values == expected).all()


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def one_schedule(
    world: World, outer: tuple[Party, int], inner: tuple[Party, int], late: float, pause: float
) -> tuple[list[bool], bool, bool]:
    """Stop both parties before a step of theirs; return the tag's outcome, and who was stopped."""
    world.reset(late)
    tagged, stops = list[bool](), list[bool]()

    def meanwhile() -> None:
        world.wait(pause)
        gate = Stopped(world.store, inner[1], lambda: tagged.append(world.tag()))
        inner[0].run(gate)
        stops.append(gate.reached)
        if not gate.reached:
            tagged.append(world.tag())

    gate = Stopped(world.store, outer[1], meanwhile)
    outer[0].run(gate)
    return tagged, gate.reached, any(stops)


def schedules(
    world: World, outer: Party, inner: Party, late: float, pause: float
) -> Iterator[bool]:
    """Run each schedule of two stops, with a tag set in the inner one; yield whether it was."""
    for first in count():
        for second in count():
            tagged, is_outer, is_inner = one_schedule(
                world, (outer, first), (inner, second), late, pause
            )
            if not is_outer:
                return
            if tagged[0]:
                world.check()
            yield tagged[0]
            if not is_inner:
                break


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, GRACE_S])
@pytest.mark.parametrize("late", [GRACE_S - 1, GRACE_S + 1])
@pytest.mark.parametrize(
    ("outer", "inner"), [(NARROW, WIDE), (WIDE, NARROW)], ids=["narrow", "wide"]
)
def test_an_acknowledged_tag_outlives_any_two_stops(
    world: World, outer: Party, inner: Party, late: float, pause: float
) -> None:
    outcomes = [*schedules(world, outer, inner, late, pause)]
    assert len(outcomes) > 60


@pytest.mark.full
@pytest.mark.parametrize("late", [GRACE_S - 1, GRACE_S + 1])
def test_a_tag_outlives_a_maintainer_that_was_stopped_before_any_step(
    world: World, late: float
) -> None:
    """The one with the wider rule runs to its end meanwhile, and the tag is set after it."""
    outcomes = set[bool]()
    for at in count():
        tagged, is_stopped, _ = one_schedule(world, (NARROW, at), (WIDE, NEVER), late, 2.0)
        if not is_stopped:
            break
        outcomes.update(tagged)
        if tagged[0]:
            world.check()
    assert outcomes == ({True, False} if late > GRACE_S else {True})


def test_a_tag_is_refused_once_the_grace_is_over_for_good(world: World) -> None:
    world.reset(GRACE_S + 1)
    NARROW.run(world.store)
    WIDE.run(world.store)
    chain = Chain.open(world.store)
    with pytest.raises(BrokenChainError, match="pruned and may be deleted") as caught:
        tags.set_(chain, "kept", chain.read(TAGGED), time=0.0)
    assert "deltachain pull" in caught.value.hint
    assert not tags.read_all(chain)
