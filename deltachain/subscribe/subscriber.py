"""The subscriber: plan, fetch, prove, swap; and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from threading import Event, RLock

from typing_extensions import override

from deltachain.chain.chain import Chain, Committed
from deltachain.closeable import Closeable
from deltachain.errors import (
    BaseMismatchError,
    BrokenChainError,
    ChainError,
    ChainMismatchError,
    DeltaChainError,
    ForkedChainError,
    PartialApplyError,
    StoreWentBackError,
)
from deltachain.store import Store, open_store
from deltachain.subscribe.config import SubscribeConfig
from deltachain.subscribe.fetch import fetch_around
from deltachain.subscribe.follow import follow
from deltachain.subscribe.history import check_history, held_by, identify, require
from deltachain.subscribe.receipt import ApplyReceipt
from deltachain.subscribe.stage import Staged
from deltachain.subscribe.status import Status, status_of
from deltachain.subscribe.targets.base import HeldVersion, Prepared
from deltachain.subscribe.targets.choose import TargetLike, as_target
from deltachain.subscribe.undo import UndoLog
from deltachain.subscribe.watch import Watch
from deltachain.threads import Pool
from deltachain.types import StateDigest, Version

logger = logging.getLogger(__name__)


class Subscriber(Closeable):
    """Keeps one target at a version of a chain.

    ``stage`` does everything that can fail and only reads the target; ``swap`` writes. A subscriber
    never goes back by itself; after ``rollback`` it stays until ``release``. Methods may be called
    from any thread: one writes at a time, and what was staged before another swap is refused.

    Args:
        config: Settings, or the URL alone.
        target: A torch module, a dict of tensors by checkpoint name, the path of a checkpoint
            folder, or any :class:`Target`.
        store: The store, if it is not to be opened from the URL.
    """

    def __init__(
        self, config: SubscribeConfig | str, target: TargetLike, *, store: Store | None = None
    ) -> None:
        self.config = SubscribeConfig(url=config) if isinstance(config, str) else config
        self.target = as_target(target)
        self.pinned = self.poisoned = False
        self.last: ApplyReceipt | None = None
        self.told = Event()
        self.watch = Watch()
        self._store = store or open_store(self.config.url, self.config.storage_options)
        self._chain: Chain | None = None
        self._held: HeldVersion | None = None
        self._generation = self._counted = 0
        self._opening, self._updating, self._writing = RLock(), RLock(), RLock()
        self._undo = UndoLog(self.config.undo_applies, self.config.stage_budget)

    def open(self) -> Chain:
        """Open the chain, bind the target to it, and find out what it holds. Again is allowed.

        Raises:
            ObjectNotFoundError: There is none yet.
            TensorMismatchError: The target is not the model of the chain.
        """
        if self._chain is None:
            with self._opening:  # whoever came later would undo what the first has applied since
                self._chain = self.opened or self._open()
        return self._chain

    def _open(self) -> Chain:
        chain = Chain.open(self._store)
        specs = {spec.name: spec for spec in chain.table.specs()}
        self.target.bind(specs, chain.table.aliases)
        self._held = identify(chain, self.target, verify=self.config.verify_at_start)
        return chain

    @property
    def chain(self) -> Chain:
        """The chain, opened when first needed: a replica may start before its trainer."""
        return self.open()

    @property
    def opened(self) -> Chain | None:
        """The chain, if it was opened already; asks nobody."""
        return self._chain

    @property
    def held(self) -> HeldVersion | None:
        """What the target holds; ``None`` for nothing that can be proven.

        Known from the first call that reads the chain.
        """
        return None if self.poisoned else self._held

    @property
    def version(self) -> Version | None:
        """The version that the target holds."""
        return self.held.version if self.held else None

    @property
    def poll_s(self) -> float:
        """Seconds between looks for a new version."""
        return self.config.poll_s or self._store.capabilities.poll_s

    def update(self, version: Version | Committed | None = None) -> ApplyReceipt | None:
        """Stage and swap.

        Args:
            version: Where to; the head when not given.

        Returns:
            ``None`` when that is what is held, or when a rollback pinned the target.
        """
        with self._updating:
            staged = self.stage(version)
            return self.swap(staged) if staged else None

    def stage(self, version: Version | Committed | None = None) -> Staged | None:
        """Fetch, verify, decode and prove the way to a version; the target is only read.

        Args:
            version: Where to, or its manifest if that was just read; the head when not given.

        Returns:
            What ``swap`` takes; ``None`` when there is nothing to do.

        Raises:
            ChainError: The version is not committed, lies behind or forked off; no way leads there;
                a rollback keeps the target elsewhere.
            FormatError: An object is corrupt, also when fetched again, and no way leads around it.
            BaseMismatchError: The target does not hold the bits that it should. It is poisoned now:
                the next call plans from nothing.
            StoreError: The store failed.
        """
        chain = self.chain
        with self._writing:  # a rollback may come at any time: these belong together
            last, held, generation, pinned = self._held, self.held, self._generation, self.pinned
        if pinned and last is not None:
            number = version.version if isinstance(version, Committed) else version
            if number not in (None, last.version):
                raise ChainError(
                    f"a rollback keeps this target at version {last.version}",
                    version=number,
                    hint="release() it first",
                )
            if held is not None:
                return None
            version = last.version  # heals, and stays
        committed = self._require(chain, version, last)
        if last is not None:  # poisoned or not: healing does not go back either
            if committed.version < last.version:
                raise ChainError(
                    f"version {committed.version} lies behind {last.version}",
                    version=committed.version,
                    hint="a subscriber goes back only by rollback()",
                )
            if held is not None and committed.version == held.version:
                self.watch.proved(held)
                return None
        return self._stage(committed, held, generation)

    def _require(
        self, chain: Chain, version: Version | Committed | None, last: HeldVersion | None
    ) -> Committed:
        """The manifest of a version that grew out of what was held last."""
        try:
            committed = require(chain, version, last)
            if last is not None:
                check_history(chain, last, committed)
        except (ChainMismatchError, ForkedChainError, StoreWentBackError) as exc:
            if last is not None:
                self.watch.note(exc, last)
            raise
        return committed

    def swap(self, staged: Staged) -> ApplyReceipt:
        """Write a staged apply into the target. Nobody else may write to it, or read it, meanwhile.

        Raises:
            BaseMismatchError: The target was swapped since; nothing was written.
            PartialApplyError: It failed, and the old bits are back.
            PoisonedError: It failed, and the target holds nothing that can be proven.
        """
        with self._writing:
            if staged.generation != self._generation:
                raise _overtaken(staged.to.version)
            start = time.perf_counter()
            swap_s = self._write(staged.prepared, staged.to)
            self.watch.proved(staged.to)
            pause_s = time.perf_counter() - start
            if staged.held is None or not staged.prepared.can_undo:
                self._undo.clear()
            else:
                self._undo.push(staged.held, staged.prepared)
            requests, self._counted = self._counted, self._store.requests
            asked = self._counted - requests
            receipt = self.last = staged.receipt(swap_s=swap_s, pause_s=pause_s, requests=asked)
        logger.info("%s", receipt)
        return receipt

    def rollback(self, version: Version | None = None) -> HeldVersion:
        """Go back, and stay there until :meth:`release`.

        Applies that are still remembered are taken back without the store; anything older is
        planned from nothing.

        Args:
            version: Where to; what was held before the last apply when not given.

        Raises:
            ChainError: There is nothing to go back to.
        """
        self.open()
        with self._writing:
            done, _ = self._take_back(version)
        return done or self._roll_back(version)

    def _roll_back(self, version: Version | None) -> HeldVersion:
        """Go back by way of the store: others may pause meanwhile, and nobody updates."""
        with self._updating:
            while True:
                with self._writing:
                    done, goal = self._take_back(version)
                    generation = self._generation
                if done:
                    return done
                staged = self._stage(require(self.chain, goal), None, generation)
                with self._writing:
                    if staged.generation == self._generation:
                        self.swap(staged)
                        self._undo.clear()

    def _take_back(self, version: Version | None) -> tuple[HeldVersion | None, Version]:
        """Go back without the store and pin, if what is remembered leads there; and where to."""
        held = self.held
        goal = self._undo.newest if version is None else version
        if goal is None or held is None or goal > held.version:
            at = held.version if held else None
            raise ChainError(
                f"cannot roll back from version {at} to {goal}", hint="name an older version"
            )
        if goal != held.version and not self._undo.reaches(goal):
            return None, goal
        while self._held is not None and self._held.version != goal:
            undo = self._undo.last()
            self._write(undo.prepared, undo.held)
            self._undo.pop()
        self.pinned = True
        self.chain.went_back(goal)
        self.watch = Watch()  # what is held now was not looked at
        self._generation += 1  # nothing that was staged before leads away from here
        logger.info("rolled back from version %d to %d and pinned", held.version, goal)
        return self._held, goal

    def release(self) -> None:
        """Follow the head again after a rollback."""
        self.pinned = False
        self.told.set()

    def follow(
        self,
        *,
        stop: Event | None = None,
        every_version: bool = False,
        looked: Callable[[DeltaChainError | None], None] = lambda _: None,
    ) -> Iterator[ApplyReceipt]:
        """Apply versions as they are committed, and heal by itself; see :func:`follow.follow`.

        >>> for receipt in subscriber.follow():                        # doctest: +SKIP
        ...     print(receipt)

        Args:
            stop: Ends it when set; ``notify()`` then makes it look at once.
            every_version: Apply each version on its own instead of folding those that are waiting.
            looked: Told after every turn what went wrong and will be tried again, if anything.
        """
        return follow(self, stop=stop or Event(), every_version=every_version, looked=looked)

    def notify(self) -> None:
        """Tell :meth:`follow` that there is something new, so that it need not wait to look."""
        self.told.set()

    def scrub(self) -> bool:
        """Recompute the state of the live bits; poison the target when it is not what it should be.

        Nobody may write to the target meanwhile.
        """
        with self._writing:
            held = self.held
            if held is None:
                return False
            if str(self.target.state()) != held.state:
                logger.error(
                    "target was modified externally; it no longer holds version %d", held.version
                )
                self._poison()
            return not self.poisoned

    def alone(self) -> AbstractContextManager[bool]:
        """A lock under which nothing is written to the target."""
        return self._writing

    def status(self) -> Status:
        """What the target holds and how far behind it is, for people and probes."""
        return status_of(self)

    @override
    def close(self) -> None:
        """Give store and target back. Closing twice is allowed."""
        self.target.close()
        self._store.close()

    def _stage(self, committed: Committed, held: HeldVersion | None, generation: int) -> Staged:
        """Stage the way to a committed version from what was held at a generation."""
        start = time.perf_counter()
        with Pool(1) as pool:  # one look beside the fetch costs no round trip more
            looking = pool.submit(self._newest, committed.version)
            fetched = fetch_around(self.chain, held, committed, base=self.config.base)
        fetched_at = time.perf_counter()
        try:
            prepared = self.target.stage(
                fetched,
                base=StateDigest.parse(held.state) if held else None,
                state=committed.state,
                budget=self.config.stage_budget,
            )
        except BaseMismatchError:
            with self._writing:
                if generation != self._generation:
                    raise _overtaken(committed.version) from None
                if not fetched.from_nothing:
                    self._poison()
            raise
        staged_at = time.perf_counter()
        return Staged(
            held=held if prepared.base_too else None,
            to=held_by(self.chain, committed),
            step=committed.manifest.step,
            time=committed.manifest.time,
            generation=generation,
            fetched=fetched,
            prepared=prepared,
            head=looking.result(),
            fetch_s=fetched_at - start,
            stage_s=staged_at - fetched_at,
        )

    def _newest(self, version: Version) -> Version:
        try:
            return self.chain.newest(version)
        except BrokenChainError:  # a gap ahead is met when it is reached
            return version

    def _write(self, prepared: Prepared, to: HeldVersion) -> float:
        self._generation += 1
        try:
            seconds = self.target.swap(prepared, to)
        except PartialApplyError:
            raise
        except BaseException:
            self._poison()
            raise
        self._held, self.poisoned = to, False
        return seconds

    def _poison(self) -> None:
        """What the target holds cannot be proven: what is staged or remembered on it is void."""
        self.poisoned = True
        self._generation += 1
        self._undo.clear()


def _overtaken(version: Version) -> BaseMismatchError:
    message = f"version {version} was staged before another swap"
    return BaseMismatchError(message, version=version, hint="stage again")
