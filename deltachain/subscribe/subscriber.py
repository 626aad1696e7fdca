"""The subscriber: stage, swap and roll back versions of a chain."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Event, Lock, RLock
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, cast

import msgspec

from deltachain import errors
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.checks import asset_paths
from deltachain.chain.fetch import Fetched
from deltachain.chain.heartbeat import check_age
from deltachain.checkpoint import HELD_FILE
from deltachain.metrics import Figure, figures, info, phases
from deltachain.redact import redacted_url
from deltachain.setting_types import whole
from deltachain.status import HealthLimits, Status, judged, lag
from deltachain.store import Location, Store, open_store
from deltachain.subscribe import history
from deltachain.subscribe.config import SubscribeConfig
from deltachain.subscribe.fetch_around import UsablePlans, fetch_around, looking_ahead
from deltachain.subscribe.follow_loop import NEEDS_A_PERSON, NOT_BEGUN, Looked, Round, repeat
from deltachain.subscribe.receipt import ApplyReceipt, Staged, Tally, overtaken
from deltachain.subscribe.targets.base import HeldVersion, PatchedTarget, Prepared, Target
from deltachain.subscribe.targets.folder import FolderTarget
from deltachain.threads import Closeable
from deltachain.types import StateDigest, Version
from deltachain.version import __version__

if TYPE_CHECKING:
    from torch import Tensor, nn


TargetLike: TypeAlias = "Target | nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]"


def as_target(thing: TargetLike) -> Target:
    if isinstance(thing, str | os.PathLike):
        return FolderTarget(Path(thing).expanduser())
    torch = sys.modules.get("torch")  # if there is a module, torch is imported already
    if isinstance(thing, Mapping) or (torch is not None and isinstance(thing, torch.nn.Module)):
        from deltachain.subscribe.targets.tensors import TensorTarget  # noqa: PLC0415

        return TensorTarget(thing)
    if not hasattr(thing, "bind"):
        raise errors.ConfigError(
            f"a {type(thing).__name__} is no target",
            hint="give a torch module, a dict of tensors by name, or the path of a folder",
        )
    return cast("Target", thing)


def bind(target: Target, chain: Chain) -> None:
    """Bind a target to a chain's tensors; warn if a module has another configuration."""
    if isinstance(target, FolderTarget):
        target.assets = asset_paths(chain.identity)
    target.bind({spec.name: spec for spec in chain.table.specs()}, chain.table.aliases)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(module := getattr(target, "source", None), torch.nn.Module):
        from deltachain.subscribe.targets.tensors import say_other_config  # noqa: PLC0415

        say_other_config(module, chain)


def subscriber_figures(
    subscriber: Subscriber,
    tally: Tally,
    *,
    engine: str,
    newest: Version | None = None,
    follows: bool = True,
) -> Iterator[Figure]:
    chain, held, last = subscriber.opened, subscriber.held, subscriber.last
    times, version = subscriber.times, held.version if held else None
    head = newest if newest is not None else chain.latest if chain else None
    yield info(engine=engine, chain=chain.identity.chain if chain else None)
    yield from figures(
        {
            "version": version,
            "head_version": head,
            "lag_versions": lag(head, version),
            "pinned": subscriber.pinned,
            "poisoned": subscriber.poisoned,
            "last_look_timestamp_seconds": times.looked_at,
            "last_apply_timestamp_seconds": times.applied_at,
            "commit_timestamp_seconds": times.commit_of(held.manifest) if held else None,
            "silence_seconds": times.silence_s if follows else None,
            "applies": tally.applies,
            "failures": tally.failures,
            "fetched_bytes": tally.nbytes,
            "written_elements": tally.nnz,
            "fetch_seconds": tally.fetch_s,
            "stage_seconds": tally.stage_s,
            "swap_seconds": tally.swap_s,
            "pause_seconds": tally.pause_s,
            "store_requests": chain.store.requests if chain else 0,
        }
    )
    yield from phases(last.phases if last else {})


NOTHING_HELD = "it holds no version of the chain"


def known_status(subscriber: Subscriber, **others: Any) -> Status:  # noqa: ANN401 - its fields
    chain, held, last = subscriber.opened, subscriber.held, subscriber.last
    times, doubt = subscriber.times, subscriber.watch.doubt
    version, head = held.version if held else None, chain.latest if chain else None
    committed_at = times.commit_of(held.manifest) if held else None
    fields: dict[str, Any] = {
        "url": chain.store.url if chain else redacted_url(subscriber.config.url),
        "chain": chain.identity.chain if chain else None,
        "version": version,
        "manifest": held.manifest if held else None,
        "state": held.state if held else None,
        "head": head,
        "lag_versions": lag(others.get("head", head), version),
        "ready": True,
        "reason": "",
        "pinned": subscriber.pinned,
        "poisoned": subscriber.poisoned,
        "trouble": str(subscriber.trouble) if subscriber.trouble else "",
        "doubt": str(doubt.args[0]) if doubt else "",
        "last": msgspec.to_builtins(last) | {"state": str(last.state)} if last else None,
        "phases": last.phases if last else {},
        "deltachain": __version__,
        "looked_at": times.looked_at,
        "applied_at": times.applied_at,
        "committed_at": committed_at,
        "silence_s": times.silence_s,
        "age_s": None if committed_at is None else max(0.0, time.time() - committed_at),
    }
    return Status(**fields | others)


LOOK_BACK: Final = 8  # poll intervals between two checks of the held version in the store


def _look_back(subscriber: Subscriber, *, is_due: bool) -> tuple[ApplyReceipt | None, bool]:
    """Check the held version if due; return any receipt, and whether the store has it."""
    held, chain, watch = subscriber.held, subscriber.chain, subscriber.watch
    if held is None or not (is_due or chain.is_doubtful or watch.is_open(held)):
        return None, True
    try:
        is_there = watch.look(chain, held)
    except errors.MirrorLagsError:
        if (newest := chain.head()) is not None:
            check_age(chain, newest)
        raise
    except errors.BrokenChainError as exc:
        receipt = None if subscriber.pinned else _around(subscriber, exc)
        if receipt is None:
            raise
        return receipt, True
    subscriber.times.looked()
    if is_there and chain.latest == held.version and chain.trust.max_age_s is not None:
        check_age(chain, chain.read(held.version))
    return None, is_there


def _around(subscriber: Subscriber, exc: errors.DeltaChainError) -> ApplyReceipt | None:
    receipt = subscriber.update()
    if receipt is not None:
        logger.warning("%s; reached version %d by another plan", exc.args[0], receipt.version)
    return receipt


def _step(subscriber: Subscriber, *, every_version: bool) -> ApplyReceipt | None:
    chain = subscriber.chain
    subscriber.scrub(if_altered=True)
    held = subscriber.held
    if held is None:
        return subscriber.update()
    if subscriber.pinned:
        return None
    later = None
    try:
        later = chain.find(held.version + 1) if every_version else chain.later(held.version)
        subscriber.times.looked()
        return subscriber.update(later) if later else None
    except (errors.FormatError, errors.ObjectNotFoundError, errors.BrokenChainError) as exc:
        if later and later.version == chain.newest(held.version):
            raise
        return _around(subscriber, exc)  # a plan may lead to a later version
    except (errors.ChainError, errors.BaseMismatchError):
        there = subscriber.version
        if not _was_rolled_back(subscriber) and (there is None or there <= held.version):
            raise
        return None  # rolled back or applied by another thread meanwhile


def _was_rolled_back(subscriber: Subscriber) -> bool:
    return subscriber.pinned and not subscriber.poisoned


class Group(Protocol):
    """Other replicas, within one version of which this one stays."""

    def tell(self, version: Version) -> None:
        """Tell them which version this one holds; never raises."""

    def newest(self) -> Version:
        """Return the newest version that this one may take; raise what it must wait for."""


class Undo(NamedTuple):
    held: HeldVersion
    prepared: Prepared


KEPT: Final = 64  # versions whose time of commit is remembered: a rollback may hold one again


class Times:
    """Times of a subscriber, in seconds since 1970, ``None`` before; thread-safe."""

    def __init__(self, unanswered_since: Callable[[], float | None] = lambda: None) -> None:
        self._unanswered_since = unanswered_since
        self.looked_at: float | None = None
        self.applied_at: float | None = None
        self._since = time.monotonic()  # the wall clock may be set meanwhile
        self._stages = 0
        self._commits: OrderedDict[str, float] = OrderedDict()
        self._lock = Lock()

    @property
    def silence_s(self) -> float:
        """Seconds since the store last answered, or since the start.

        0 while objects are fetched and decoded; of stores that tell, only while requests for them
        are answered. Otherwise a fetch without an answer ends with an error, so this counts again
        soon.
        """
        with self._lock:
            since = self._unanswered_since() if self._stages else self._since
        return 0.0 if since is None else time.monotonic() - since

    def looked(self) -> None:
        with self._lock:
            self._since, self.looked_at = time.monotonic(), time.time()

    @contextmanager
    def staging(self) -> Iterator[None]:
        with self._lock:
            self._stages += 1
        try:
            yield
            self.looked()
        finally:
            with self._lock:
                self._stages -= 1

    def applied(self, manifest: str, committed_at: float) -> None:
        self.applied_at = time.time()
        self.committed(manifest, committed_at)

    def committed(self, manifest: str, at: float) -> None:
        with self._lock:
            self._commits[manifest] = at
            self._commits.move_to_end(manifest)
            while len(self._commits) > KEPT:
                self._commits.popitem(last=False)

    def commit_of(self, manifest: str) -> float | None:
        return self._commits.get(manifest)


logger = logging.getLogger(__name__)


class Subscriber(Closeable):
    """Keeps a target at a version of a chain.

    ``stage`` fetches and verifies and only reads the target; ``swap`` writes. A subscriber never
    goes back by itself; after ``rollback`` it stays at that version until ``release``. Methods are
    thread-safe: one call writes at a time, and a swap of an outdated stage is refused.

    Args:
        config: Settings, or the URL or the folder alone.
        target: Torch module, dict of tensors by name, path of a folder, or any :class:`Target`. A
            dict has all tensors of the chain, in its shapes and dtypes, and is written in place,
            but not between two receipts of ``follow``.
        store: The store; opened from the URL if ``None``.

    Examples:
        >>> subscriber = deltachain.Subscriber(url, weights)  # a dict of tensors, or a module
        >>> subscriber.update().version
        1
    """

    def __init__(
        self, config: SubscribeConfig | Location, target: TargetLike, *, store: Store | None = None
    ) -> None:
        self.config = SubscribeConfig.of(config)
        self.target = as_target(target)
        self.pinned = self.poisoned = False
        self.last: ApplyReceipt | None = None
        self.trouble: errors.DeltaChainError | None = None  # of the last round of `follow`
        self.told = Event()
        self.group: Group | None = None
        self.whose = ""  # before versions in the log, of a target beside another one
        self._usable = UsablePlans(self.config.base)
        store = self.store = store or open_store(self.config.url, self.config.storage_options)
        # Not by way of self: a cycle would keep the target's tensors until it is collected.
        self.watch, self.times = history.Watch(), Times(lambda: store.unanswered_since)
        self._chain: Chain | None = None
        self._held: HeldVersion | None = None
        self._generation = self._counted = 0
        self._opening, self._updating, self._writing = RLock(), RLock(), RLock()
        self._undo: deque[Undo] = deque(maxlen=self.config.undo_applies)

    def open(self) -> Chain:
        """Open the chain, bind the target to it, and find the version it holds; idempotent.

        Raises:
            NoChainError: The store has no chain yet.
            SignatureError: No trusted key signed the chain.
            TensorMismatchError: The target is not the model of the chain.
        """
        if self._chain is None:
            with self._opening:  # a second opening would discard versions applied since the first
                self._chain = self.opened or self._open()
        return self._chain

    def _open(self) -> Chain:
        try:
            chain = Chain.open(self.store, self.config.trust())
        except errors.NoChainError as exc:
            target = self.target
            if isinstance(target, FolderTarget) and (target.folder / HELD_FILE).exists():
                raise errors.ObjectNotFoundError(
                    f"{self.store.url} has no chain, and {target.folder} holds a version of one",
                    key=exc.key,
                    hint="check the URL; if the folder's chain was there, restore it",
                ) from None
            raise
        bind(self.target, chain)
        self._held = history.identify(chain, self.target, verify=self.config.verify_at_start)
        self.times.looked()
        return chain

    @property
    def chain(self) -> Chain:
        """The chain, opened on first access: a replica may start before its trainer."""
        return self.open()

    @property
    def opened(self) -> Chain | None:
        """The chain if it is open, else ``None``; makes no request."""
        return self._chain

    @property
    def held(self) -> HeldVersion | None:
        """The proven version that the target holds; ``None`` for none, or before :meth:`open`."""
        return None if self.poisoned else self._held

    @property
    def version(self) -> Version | None:
        """Number of the held version; ``None`` for none."""
        return self.held.version if self.held else None

    @property
    def poll_s(self) -> float:
        """Seconds between polls for a new version."""
        return self.config.poll_s or self.store.capabilities.poll_s

    def update(self, version: Version | Committed | None = None) -> ApplyReceipt | None:
        """Stage and swap a version.

        Args:
            version: The version; the head if ``None``.

        Returns:
            ``None`` if this version is held already, or a rollback pinned the target.
        """
        with self._updating:
            return self.swap(staged) if (staged := self.stage(version)) else None

    def heal(self, *, at_head: bool = False) -> ApplyReceipt | None:
        """Update a poisoned target from nothing, to the version held last or to the head."""
        with self._updating:
            last = None if at_head else self._held
            return self.update(last.version if last else None)

    def stage(self, version: Version | Committed | None = None) -> Staged | None:
        """Fetch, decode and verify an update to a version; the target is only read.

        Args:
            version: The version, or its manifest if that was just read; the head if ``None``.

        Returns:
            The argument of ``swap``; ``None`` if there is nothing to do.

        Raises:
            ChainError: The version is not committed, older than the held one or forked off; no plan
                exists; or a rollback pinned the target.
            FormatError: An object is corrupt, even when fetched again, and no plan avoids it.
            BaseMismatchError: The target holds other bits; the next call plans from nothing.
            StoreError: The store failed.
        """
        chain = self.chain
        self.scrub(if_altered=True)
        with self._writing:  # a concurrent rollback changes all three
            last, held, generation, pinned = self._held, self.held, self._generation, self.pinned
        if pinned and last is not None:
            number = version.version if isinstance(version, Committed) else version
            if number not in (None, last.version):
                raise errors.ChainError(
                    f"a rollback keeps this target at version {last.version}",
                    version=number,
                    hint="call release() first",
                )
            if held is not None:
                return None
            version = last.version  # heal at the pinned version
        committed = self._require(chain, version, last)
        if self.group is not None:
            committed = self._together(self.group, chain, committed, last, asked=version)
        if last is not None:  # healing a poisoned target does not go back either
            if committed.version < last.version:
                raise errors.ChainError(
                    f"version {committed.version} is older than the held {last.version}",
                    version=committed.version,
                    hint="call rollback() to go back",
                )
            if held is not None and committed.version == held.version:
                self.watch.proved(held)
                return None
        return self._stage(committed, held, generation)

    def _together(
        self,
        group: Group,
        chain: Chain,
        committed: Committed,
        last: HeldVersion | None,
        *,
        asked: Version | Committed | None,
    ) -> Committed:
        """Return the version, or an earlier one that the group allows if no number was asked."""
        if last is not None:
            group.tell(last.version)
            if committed.version <= last.version:
                return committed
        newest = group.newest()
        if committed.version <= newest:
            return committed
        if isinstance(asked, int) or (last is not None and newest <= last.version):
            raise errors.ControlPlaneError(
                f"version {committed.version} waits until all replicas of the group hold "
                f"{committed.version - 1}, the last one holds {newest - 1}",
                hint="see the status of the others",
            )
        return self._require(chain, newest, last)

    def _require(
        self, chain: Chain, version: Version | Committed | None, last: HeldVersion | None
    ) -> Committed:
        try:
            committed = history.require(chain, version, last)
            self.times.looked()
            self.times.committed(committed.digest, committed.manifest.time)
            if last is not None:
                history.check_history(chain, last, committed)
        except (
            errors.ChainMismatchError,
            errors.ForkedChainError,
            errors.StoreWentBackError,
        ) as exc:
            if last is not None:
                self.watch.note(exc, last)
            raise
        return committed

    def swap(self, staged: Staged) -> ApplyReceipt:
        """Write a staged apply into the target, which must not be used meanwhile.

        Raises:
            BaseMismatchError: Another swap happened since; nothing was written.
            PartialApplyError: The write failed, and the old bits are restored.
            PoisonedError: The write failed, and the state of the target is unknown.
        """
        with self._writing:
            if staged.generation != self._generation:
                raise overtaken(staged.to.version)
            start = time.perf_counter()
            swap_s = self._write(staged.prepared, staged.to)
            self.watch.proved(staged.to)
            self.times.applied(staged.to.manifest, staged.manifest.time)
            pause_s = time.perf_counter() - start
            if staged.held is None or not staged.prepared.can_undo:
                self._undo.clear()
            else:
                self._undo.append(Undo(staged.held, staged.prepared.undo()))
            while sum(undo.prepared.nbytes for undo in self._undo) > self.config.stage_budget:
                self._undo.popleft()
            requests, self._counted = self._counted, self.store.requests
            asked = self._counted - requests
            receipt = self.last = staged.receipt(swap_s=swap_s, pause_s=pause_s, requests=asked)
        logger.info("%s%s", self.whose, receipt)
        return receipt

    def rollback(self, version: Version | None = None) -> HeldVersion:
        """Go back, by the undo log or by a plan from nothing; stay there until :meth:`release`.

        Args:
            version: The version; the one held before the last apply if ``None``.

        Raises:
            ChainError: There is no such older version.
        """
        self.open()
        with self._writing:
            done, goal = self._take_back(version)
        return done or self._roll_back(goal)

    def _roll_back(self, version: Version) -> HeldVersion:
        with self._updating:
            while True:
                with self._writing:
                    done, goal = self._take_back(version)
                    generation = self._generation
                if done:
                    return done
                staged = self._stage(history.require(self.chain, goal), None, generation)
                with self._writing:
                    if generation == self._generation:
                        self.swap(staged)
                        self._undo.clear()

    def _take_back(self, version: Version | None) -> tuple[HeldVersion | None, Version]:
        """Go back by the undo log and pin, if it reaches; return the held version and the goal."""
        held = self._held
        newest = self._undo[-1].held.version if self._undo else None
        goal = newest if version is None else whole("version", version)
        if goal is None or held is None or goal > held.version:
            told = f"cannot roll back from version {self.version} to {goal}"
            raise errors.ChainError(told, hint="name an older version")
        reached = {held.version, *(undo.held.version for undo in self._undo)}
        self.scrub(if_altered=True)
        if self.poisoned or goal not in reached:
            return None, goal
        while self._held is not None and self._held.version != goal:
            undo = self._undo[-1]
            try:
                self._write(undo.prepared, undo.held)
            except errors.ExpertsMovedError:
                self._undo.clear()
                return None, goal
            self._undo.pop()
        self.pinned = True
        self.chain.went_back(goal)
        self.watch = history.Watch()  # the version held now was not checked yet
        self._generation += 1  # invalidates earlier stages
        logger.info("rolled back from version %d to %d and pinned", held.version, goal)
        return self._held, goal

    def release(self) -> None:
        """Unpin the target after a rollback, so that it follows the head again."""
        self.pinned = False
        self.told.set()

    def follow(
        self,
        *,
        stop: Event | None = None,
        every_version: bool = False,
        looked: Looked = lambda _: None,
    ) -> Iterator[ApplyReceipt]:
        """Apply versions as they are committed, and recover from failures.

        A target without a version begins at the head; for all versions, call ``update(0)`` first.
        An unavailable store, a corrupt or missing object and a target that was modified externally
        are logged once and retried with back-off, from nothing if the target's state is unknown.
        Errors that need an operator are raised: a fork, another model, a newer format.

        Args:
            stop: Ends the loop when set; call ``notify()`` to end it without a wait.
            every_version: Apply each version on its own instead of folding pending versions.
            looked: Called after each iteration with the error to be retried, or ``None``.
        """
        polls = 0  # since the last look back

        def round_(failures: int) -> Round[ApplyReceipt]:
            nonlocal polls
            polls += 1
            is_due = polls >= LOOK_BACK or failures > 0
            receipt, trouble = None, list[errors.DeltaChainError]()
            try:
                receipt = _step(self, every_version=every_version)
                around, is_sure = _look_back(self, is_due=is_due)
                polls = 0 if is_due else polls
                receipt = receipt or around
                if is_sure:
                    self.trouble = None
                    looked(None)
            except NEEDS_A_PERSON as exc:
                self.trouble = exc
                self.watch.ended(exc)
                raise
            except errors.DeltaChainError as exc:
                trouble.append(exc)  # raised after the receipt: its version was applied
                if isinstance(exc, NOT_BEGUN):
                    self.times.looked()
                else:
                    self.trouble = exc
            if receipt is not None:
                yield receipt
            if trouble:
                raise trouble.pop()  # a variable would make a cycle, and keep what was staged
            return receipt is not None and receipt.lag_versions > 0  # later ones are known already

        return repeat(
            round_,
            stop=stop or Event(),
            poll_s=self.poll_s,
            looked=looked,
            doing=f"following {self.store.url}",
            told=self.told,
        )

    def notify(self) -> None:
        """Wake :meth:`follow`, so that it polls at once."""
        self.told.set()

    def scrub(self, *, if_altered: bool = False) -> bool:
        """Verify the live bits by their state digest; poison the target if they differ.

        ``if_altered`` leaves out a target that nobody else changed. Returns whether they match.
        """
        with self._writing:
            if (held := self.held) is None or (if_altered and not self.target.is_altered()):
                return held is not None
            try:
                state = self.target.state()
            except (errors.FormatError, errors.TensorMismatchError):
                self._poison()
                raise
            if str(state) != held.state:
                logger.error("the target was modified: it no longer holds version %d", held.version)
                self._poison()
            return not self.poisoned

    def alone(self) -> AbstractContextManager[bool]:
        """Lock out writes to the target."""
        return self._writing

    def status(self) -> Status:
        """Return the held version, its lag and its health as of the last look, for probes.

        Makes no request, and raises nothing: before :meth:`open` it holds no version.
        """
        waits = NOTHING_HELD if self.held is None else ""
        return judged(known_status(self), HealthLimits(silence_s=None), waits)

    def close(self) -> None:
        """Release store and target; idempotent."""
        self.target.close()
        self.store.close()

    def _stage(self, committed: Committed, held: HeldVersion | None, generation: int) -> Staged:
        start, budget, chain = time.perf_counter(), self.config.stage_budget, self.chain
        look_s = max(0.0, time.time() - committed.manifest.time)
        target, specs = self.target, chain.table.specs()
        once, room = False, None
        if isinstance(target, PatchedTarget):
            once, room = target.decodes_once(specs, budget), target.room

        def stage(fetched: Fetched) -> Prepared:
            try:
                return self.target.stage(
                    fetched,
                    base=StateDigest.parse(held.state) if held else None,
                    state=committed.state,
                    budget=budget,
                )
            except errors.BaseMismatchError:
                with self._writing:
                    if generation != self._generation:
                        raise overtaken(committed.version) from None
                    if not fetched.from_nothing:
                        self._poison()
                raise

        ahead = looking_ahead(chain, committed.version, every_s=self.poll_s)
        with self.times.staging(), ahead as looking:
            fetched, prepared = fetch_around(
                chain,
                held,
                committed,
                stage,
                usable=self._usable,
                hold=not once,
                room=room,
                wanted=target.wanted,
            )
        fetched_at = max([start, *fetched.times])
        staged_at = time.perf_counter()
        return Staged(
            held=held if prepared.base_too else None,
            to=history.held_by(chain, committed),
            manifest=committed.manifest,
            generation=generation,
            fetched=fetched,
            prepared=prepared,
            head=looking.result(),
            look_s=look_s,
            fetch_s=fetched_at - start,
            stage_s=staged_at - fetched_at,
        )

    def _write(self, prepared: Prepared, to: HeldVersion) -> float:
        self._generation += 1
        try:
            seconds = self.target.swap(prepared, to)
        except BaseException as exc:
            if not isinstance(exc, errors.PartialApplyError):
                self._poison()
            raise
        self._held, self.poisoned = to, False
        if self.group is not None:
            self.group.tell(to.version)
        return seconds

    def _poison(self) -> None:
        self.poisoned = True
        self._generation += 1
        self._undo.clear()
