"""A chain, a trainer and two followers under anything that can happen to them, in any order.

After every step: what is committed never changes and has the bits that the trainer had; versions
and epochs only grow; a follower holds the bits of the version that it claims, and goes back only
when told to; an apply that failed wrote nothing.
"""

import itertools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deltachain.chain.chain import Chain
from deltachain.errors import DeltaChainError, PoisonedError, PublisherFencedError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore, Store, open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.crash.child import Place
from tests.support.faults import Action, Fault, FaultyStore
from tests.support.models import (
    Replica,
    State,
    bits_of,
    plain_model,
    recompute,
    replica_of,
    same,
    scribble,
    train_,
)

pytestmark = pytest.mark.full

SEEDS = st.integers(0, 1 << 16)
PLACES = st.integers(0, (1 << 16) - 1)
"""Position in a list, modulo its length: hypothesis refuses draws that depend on the length."""
SHARES = st.sampled_from([0.005, 0.02, 0.3, 1.0])
WHO = st.sampled_from([0, 1])
FAILURES: list[tuple[Action, str]] = [
    ("fail", "deltas/"),
    ("lose-reply", "deltas/"),
    ("full", "deltas/"),
    ("fail", "manifests/"),
    ("refuse", "manifests/"),
]
TROUBLE: list[tuple[Action, str]] = [
    ("corrupt", "anchors/"),
    ("corrupt", "deltas/"),
    ("truncate", ""),
    ("hide", ""),
]
ENCODINGS = st.sampled_from(["step", "overwrite", "raw"])


class Follower:
    """A subscriber, its target, and what is known of it."""

    def __init__(self, store: Store, replica: Replica) -> None:
        self.inner, self.replica = store, replica
        self.tainted, self.floor = False, -1
        self.open()

    def open(self) -> None:
        self.store = FaultyStore(self.inner)
        config = SubscribeConfig(url=self.inner.url, stage_budget=20_000)
        self.subscriber = Subscriber(config, self.replica.target, store=self.store)

    def bits(self) -> State | None:
        target = self.replica.target
        empty = isinstance(target, Path) and not (target / "model.safetensors").exists()
        return None if empty else self.replica.bits()

    def attempt(self, call: Callable[[], object]) -> None:
        before = self.bits()
        try:
            call()
        except PoisonedError:
            raise AssertionError("nothing here breaks in the middle of a write") from None
        except DeltaChainError:
            after = self.bits()
            assert (before is None) == (after is None)
            assert before is None or after is None or same(before, after)

    def scribble(self, name: str) -> None:
        scribble(self.replica, name=name)
        self.tainted = True


def publish_and_wait(publisher: Publisher, step: int | None = None) -> None:
    publisher.publish(step=step)
    publisher.flush()


class Machine(RuleBasedStateMachine):
    fresh: Callable[[], Store] = MemoryStore

    @initialize(encoding=ENCODINGS, every=st.sampled_from([1, 3, 1000]))
    def begin(self, encoding: str, every: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="deltachain-machine-"))
        self.inner = type(self).fresh()
        self.settings: dict[str, Any] = {"encoding": encoding, "anchor_every": every}
        self.truth: list[State] = []
        self.manifests: list[bytes] = []
        self.damaged: dict[str, bytes] = {}
        self.attach(plain_model())
        self.note(bits_of(self.model))
        self.followers = [
            Follower(self.inner, replica_of(self.model, "dict", self.folder / "unused")),
            Follower(self.inner, replica_of(self.model, "folder", self.folder / "mirror")),
        ]

    def teardown(self) -> None:
        if not hasattr(self, "followers"):
            return
        try:
            self.end()
        finally:
            shutil.rmtree(self.folder)

    def end(self) -> None:
        for key, data in self.damaged.items():
            self.inner.put(key, data)
        found = recompute(self.inner)
        assert len(found) == len(self.truth)
        assert all(same(found[v].state, state) for v, state in enumerate(self.truth))
        newcomer = Follower(self.inner, replica_of(self.model, "dict", self.folder))
        for follower in (*self.followers, newcomer):
            follower.store.mend()
            if follower.tainted:
                follower.subscriber.scrub()
            follower.subscriber.release()
            follower.subscriber.update()
            assert follower.subscriber.version == len(self.truth) - 1
            bits = follower.bits()
            assert bits is not None
            assert same(bits, self.truth[-1])

    # The trainer

    def attach(self, model: Any) -> None:
        self.model, self.store = model, FaultyStore(self.inner)
        config = PublishConfig(url=self.inner.url, **self.settings)
        self.publisher = Publisher(config, store=self.store).attach(model)

    def note(self, *states: State) -> None:
        chain = Chain.open(self.inner)
        head = chain.head()
        assert head is not None
        new = head.version + 1 - len(self.truth)
        assert new <= len(states)
        self.truth += states[len(states) - new :]
        for info in list(self.inner.list("manifests/"))[len(self.manifests) :]:
            self.manifests.append(self.inner.get(info.key))

    def take_over(self, model: Any) -> None:
        before = len(self.truth)
        old = self.publisher
        self.attach(model)
        changed = not same(self.truth[-1], bits_of(model))
        self.note(self.truth[-1], *([bits_of(model)] if changed else []))
        assert len(self.truth) == before + 1 + changed
        with pytest.raises(PublisherFencedError):
            publish_and_wait(old)
        self.note()

    @rule(seed=SEEDS, share=SHARES)
    def publish(self, seed: int, share: float) -> None:
        before = len(self.truth)
        train_(self.model, seed, share=share)
        publish_and_wait(self.publisher, seed)
        self.note(bits_of(self.model))
        assert len(self.truth) == before + 1

    @rule(seed=SEEDS, share=SHARES, failure=st.sampled_from(FAILURES))
    def publish_fails(self, seed: int, share: float, failure: tuple[Action, str]) -> None:
        fault = Fault(*failure)
        self.store.add(fault)
        train_(self.model, seed, share=share)
        future = self.publisher.publish(step=seed)
        error = future.exception(60)
        if error is not None:
            with pytest.raises(type(error)):
                self.publisher.flush()
        assert (error is None) == (not self.store.struck)
        self.note(*([] if error else [bits_of(self.model)]))
        self.store.mend()
        self.store.struck.clear()

    @rule(seed=SEEDS, share=SHARES, known=st.booleans())
    def reply_is_lost(self, seed: int, share: float, known: bool) -> None:
        self.store.add(Fault("lose-reply", "manifests/"))
        if not known:
            self.store.add(Fault("hide", f"manifests/{len(self.truth):020d}", times=None))
        train_(self.model, seed, share=share)
        future = self.publisher.publish(step=seed)
        assert (future.exception(60) is None) == known
        if not known:
            with pytest.raises(DeltaChainError):
                self.publisher.flush()
        self.note(bits_of(self.model))
        self.store.mend()
        self.store.struck.clear()

    @rule()
    def restart_in_the_same_state(self) -> None:
        model = plain_model()
        model.load_state_dict(self.model.state_dict())
        self.take_over(model)

    @rule(at=PLACES)
    def restart_in_an_older_state(self, at: int) -> None:
        version = at % len(self.truth)
        model = plain_model()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                bits = torch.from_numpy(self.truth[version][name].view("<i2").copy())
                tensor.view(-1).view(torch.int16).copy_(bits)
        self.take_over(model)

    @rule(seed=SEEDS)
    def another_publisher_takes_over(self, seed: int) -> None:
        self.take_over(plain_model(seed))

    @rule(at=PLACES)
    def an_object_is_damaged(self, at: int) -> None:
        keys = [i.key for prefix in ("anchors/", "deltas/") for i in self.inner.list(prefix)]
        key = keys[at % len(keys)]
        sound = self.damaged.setdefault(key, self.inner.get(key))
        self.inner.put(key, sound[:-1] + bytes([sound[-1] ^ 1]))

    @precondition(lambda self: self.damaged)
    @rule()
    def the_objects_are_repaired(self) -> None:
        for key, data in self.damaged.items():
            self.inner.put(key, data)
        self.damaged.clear()

    # The followers

    @rule(who=WHO)
    def follow(self, who: int) -> None:
        follower = self.followers[who]
        follower.attempt(follower.subscriber.update)

    @rule(who=WHO, at=PLACES)
    def follow_to(self, who: int, at: int) -> None:
        follower = self.followers[who]
        version = at % (len(self.truth) + 1)
        follower.attempt(lambda: follower.subscriber.update(version))

    @rule(who=WHO, trouble=st.sampled_from(TROUBLE), nth=st.integers(1, 4))
    def follow_through_trouble(self, who: int, trouble: tuple[Action, str], nth: int) -> None:
        follower = self.followers[who]
        follower.store.add(Fault(*trouble, nth=nth, times=2))
        follower.attempt(follower.subscriber.update)
        follower.store.mend()

    @rule(who=WHO, at=st.none() | PLACES)
    def roll_back(self, who: int, at: int | None) -> None:
        follower = self.followers[who]
        follower.floor = -1
        version = None if at is None else at % len(self.truth)
        follower.attempt(lambda: follower.subscriber.rollback(version))

    @rule(who=WHO)
    def release(self, who: int) -> None:
        self.followers[who].subscriber.release()

    @rule(who=WHO)
    def restart_a_follower(self, who: int) -> None:
        follower = self.followers[who]
        follower.open()
        follower.tainted, follower.floor = False, -1  # it verifies what it finds
        follower.attempt(lambda: follower.subscriber.chain)

    @rule(who=WHO, name=st.sampled_from(["0.weight", "1.bias"]))
    def somebody_else_writes(self, who: int, name: str) -> None:
        if self.followers[who].subscriber.version is not None:
            self.followers[who].scribble(name)

    @rule(who=WHO)
    def scrub(self, who: int) -> None:
        follower = self.followers[who]
        version, bits = follower.subscriber.version, follower.bits()
        sound = version is not None and bits is not None and same(bits, self.truth[version])
        assert follower.subscriber.scrub() == sound
        follower.tainted = False

    # What always holds

    @invariant()
    def what_is_committed_never_changes(self) -> None:
        now = [self.inner.get(info.key) for info in self.inner.list("manifests/")]
        assert now == self.manifests
        assert len(self.truth) == len(now)

    @invariant()
    def history_is_one_line(self) -> None:
        chain = Chain.open(self.inner)
        history = list(chain.history(0, len(self.truth) - 1))
        epochs = [committed.manifest.epoch for committed in history]
        assert epochs == sorted(epochs)
        named = [ref.key for c in history for ref in c.manifest.edge.parts]
        assert len(set(named)) == len(named)
        assert all(self.inner.find(key) is not None for key in named)

    @invariant()
    def followers_hold_what_they_claim(self) -> None:
        chain = Chain.open(self.inner)
        for follower in self.followers:
            held = follower.subscriber.held
            if held is None:
                follower.tainted = False  # nothing is claimed
                continue
            committed = chain.read(held.version)
            assert (held.manifest, held.state) == (committed.digest, committed.manifest.state)
            assert held.version >= follower.floor
            follower.floor = held.version
            bits = follower.bits()
            assert bits is not None
            assert follower.tainted or same(bits, self.truth[held.version])


def check(machine: type[Machine], examples: int, steps: int, **more: Any) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
        **more,
    )
    run_state_machine_as_test(machine, settings=chosen)


def test_anything_in_any_order() -> None:
    check(Machine, 25, 30, derandomize=True)


@pytest.mark.slow
def test_anything_in_any_order_for_longer() -> None:
    check(Machine, 300, 60, database=None)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3", "hf"], indirect=True)
def test_anything_in_any_order_on_a_server(place: Place) -> None:
    numbers = itertools.count()

    class ServerMachine(Machine):
        fresh = staticmethod(lambda: open_store(place.url(str(next(numbers)))))

    check(ServerMachine, 16, 15, derandomize=True)
