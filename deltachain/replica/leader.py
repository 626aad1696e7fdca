"""The leader of a replica: decides which versions its ranks apply, and when.

It runs beside the engine's scheduler, in a process that can call all ranks. The status is answered
from memory, without a request to the store or the engine.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Event, Thread
from typing import Final, Self

from deltachain import errors
from deltachain.metrics import Figure, figures
from deltachain.redact import redacted_url
from deltachain.status import HealthLimits, Status, judged
from deltachain.store import Store
from deltachain.subscribe.history import is_past
from deltachain.subscribe.receipt import ApplyReceipt, Staged, Tally
from deltachain.subscribe.subscriber import (
    NOTHING_HELD,
    Subscriber,
    known_status,
    subscriber_figures,
)
from deltachain.subscribe.targets.base import HeldVersion
from deltachain.threads import started
from deltachain.types import Version

from .draft import Draft
from .engine import Engine, age
from .messages import status_row
from .settings import ReplicaSettings
from .target import ReplicaTarget

EVERY_S: Final = 5.0
"""Seconds between two questions, which every rank answers between two steps of the engine."""

EVERY_S_IF_PAUSED: Final = 0.5
"""The same while another client's pause keeps a replica from being ready."""

MAX_SILENCE_S: Final = 60.0
"""Seconds without an answer after which a replica is not ready; longer than an engine's step."""


class EngineWatch:
    """Questions to an engine, in a thread of their own; none while it has released memory.

    An idle engine that hangs, or that another client has paused, raises no error by itself.
    """

    def __init__(
        self, target: ReplicaTarget, is_asleep: Callable[[], bool], *, every_s: float = EVERY_S
    ) -> None:
        self._target = target
        self._is_asleep = is_asleep
        self._every_s = every_s
        self._unanswered_since: float | None = None

    @property
    def fault(self) -> str:
        """Why the engine cannot be relied upon, without a request to it; empty if it can."""
        if self._target.engine.is_dead():
            return "the engine is dead"
        since = self._unanswered_since  # changes in the other thread
        silence_s = 0.0 if since is None else time.monotonic() - since
        if silence_s > MAX_SILENCE_S:
            return f"the engine has not answered for {silence_s:.0f} s"
        return ""

    def run(self, stop: Event) -> None:
        self._ask()
        while not stop.wait(
            min(self._every_s, EVERY_S_IF_PAUSED) if self._target.holds.why else self._every_s
        ):
            self._ask()

    def _ask(self) -> None:
        if self._is_asleep():
            self._unanswered_since = None
            return
        is_first = self._unanswered_since is None
        if is_first:
            self._unanswered_since = time.monotonic()
        try:
            self._target.look()
        except errors.LeaderReplacedError:
            raise
        except errors.PartialApplyError:  # an answer: another client has an open update session
            self._unanswered_since = None
        except Exception as exc:  # noqa: BLE001 - engines raise plain exceptions
            if is_first:
                logger.warning("the engine did not answer: %s", exc)
        else:
            self._unanswered_since = None


REFUSALS: Final = (errors.ConfigError, errors.TensorMismatchError)
"""Errors that a retry cannot resolve: the engine or its settings do not fit this chain."""

logger = logging.getLogger(__name__)


class Leader:
    """The leader of a replica: updates all ranks, automatically or on request.

    Methods may be called from any thread.
    """

    def __init__(
        self, settings: ReplicaSettings, engine: Engine, *, store: Store | None = None
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.target = ReplicaTarget(engine, settings.subscribe.url, settings.spool)
        self.subscriber = Subscriber(settings.subscribe, self.target, store=store)
        self.draft = Draft(settings, self.target) if settings.draft_url else None
        self.target.beside = self.draft
        self.tally = Tally()
        self.released: frozenset[str] = frozenset()
        self.trouble: errors.DeltaChainError | None = None
        self.staged: Staged | None = None
        self.ended = ""
        self.caught_up = self._has_failed = False
        self.engine_watch = EngineWatch(self.target, lambda: bool(self.released))
        self._announced: Version | None = None
        self._stop = Event()
        self._thread: Thread | None = None
        self._watching: Thread | None = None

    def start(self) -> None:
        """Catch up with the head, then follow the chain if the settings say so.

        Errors are logged and kept for ``status``: the engine serves the weights that it loaded, and
        the replica is not ready. After a refusal nothing is followed, since it would be repeated.
        """
        try:
            self.update()
            if self.draft is not None:
                self.draft.start()
        except errors.DeltaChainError as exc:
            if isinstance(exc, REFUSALS):
                if self.settings.strict or isinstance(exc, errors.EngineDamagedError):
                    self.stop()
                    raise
                self.ended = f"following ended: {exc}"
            logger.warning(
                "not caught up with %s: %s", redacted_url(self.settings.subscribe.url), exc
            )
        if self.settings.follow and not self.ended:
            self.begin()
        self._watch_engine()

    def begin(self) -> Self:
        """Follow the chain, without a wait until it has caught up; an error is for ``status``."""
        self._thread = in_a_thread(self._follow, "deltachain-follow")
        return self

    def end(self) -> None:
        """Request the follower to stop soon; may be called from a signal handler."""
        self._stop.set()
        self.subscriber.notify()

    def stop(self) -> None:
        self.end()
        if self._thread is not None:
            self._thread.join()
        self.subscriber.close()
        if self.draft is not None:
            self.draft.subscriber.close()

    def stage(self, version: Version | None = None) -> Version | None:
        """Fetch, prove and stage a version while the engine generates; an update then swaps.

        Returns the staged version, by default the head; ``None`` if there is nothing to do.
        """
        try:
            try:
                staged = self.staged = self.subscriber.stage(version)
            except errors.ExpertsMovedError:  # they need other parts of the objects
                staged = self.staged = self.subscriber.stage(version)
        except errors.DeltaChainError as exc:
            self._failed(exc, version)  # staging may find that the held version is not provable
            raise
        return None if staged is None else staged.to.version

    def update(self, version: Version | None = None, *, manifest: str = "") -> ApplyReceipt | None:
        """Bring the replica to a version, from nothing if it is poisoned."""
        held = self.subscriber.held
        if version is not None and manifest:
            self._announced = max(version, self._announced or 0)
            try:
                ahead = held if held is not None and held.version >= version else None
                if ahead and is_past(self.subscriber.chain, ahead, version, manifest):
                    self.target.check_leads()  # another leader may have brought another version
                    return None
            except errors.DeltaChainError as exc:
                self._failed(exc, version)
                raise
        receipt = self._reach(
            lambda: self._swap_staged(version) or self.subscriber.update(version), version
        )
        held = self.subscriber.held
        if manifest and held and held.version == version and held.manifest != manifest:
            raise errors.ChainError(
                f"version {version} here has the manifest {held.manifest}, not {manifest}",
                hint="give trainer and replica the same URL",
            )
        return receipt

    def _swap_staged(self, version: Version | None) -> ApplyReceipt | None:
        staged, self.staged = self.staged, None
        if staged is None or staged.to.version != version:
            return None
        # Another version was swapped in, or experts moved: stage again.
        with suppress(errors.BaseMismatchError, errors.ExpertsMovedError):
            return self.subscriber.swap(staged)
        return None

    def rollback(self, version: Version | None = None) -> HeldVersion:
        """Go back to a version, and pin the replica there; see :meth:`Subscriber.rollback`."""
        self._announced = None
        try:
            held = self.subscriber.rollback(version)
        except errors.DeltaChainError as exc:
            self._failed(exc, -1 if version is None else version)
            raise
        self._well()
        return held

    def release(self) -> None:
        """Follow the head again after a rollback, even if following has ended."""
        self.subscriber.release()
        if self._thread is not None and self._has_failed and not self._stop.is_set():
            self._thread.join()  # it is ending, and has recorded the reason
            self.ended, self._has_failed = "", False
            self.begin()

    def notify(self) -> None:
        self.subscriber.notify()

    def pause(self) -> None:
        """Pause generation until ``resume``, regardless of applies meanwhile."""
        with self.subscriber.alone():
            self.target.pause()

    def resume(self) -> None:
        """Resume generation, unless the replica cannot prove the version that it holds."""
        with self.subscriber.alone():  # never in the middle of a swap
            if self.subscriber.poisoned:
                message = "this replica cannot prove what it holds; it stays paused"
                raise errors.PoisonedError(message)
            self.target.resume()

    def scrub(self) -> bool:
        """Recompute the state digest of the live weights; heal the replica if it is wrong.

        A replica that follows is healed at the head, any other at the version it should hold.
        Returns whether the digest was right.
        """
        fine = self.subscriber.scrub()
        if self.draft is not None:
            self.draft.scrub()
        if not fine:
            message = "the live weights are not what this replica should hold"
            self._troubled(errors.ApplyError(message))
            follows = self.settings.follow and not self.ended
            self._reach(lambda: self.subscriber.heal(at_head=follows), None)
        return fine

    def status(self) -> Status:
        """Return the status of the replica; makes no request to the store or the engine."""
        subscriber, target = self.subscriber, self.target
        doubt = subscriber.watch.doubt
        if subscriber.pinned and isinstance(doubt, errors.BrokenChainError):
            doubt = None  # a pinned replica ignores lost manifests
        status = known_status(
            subscriber,
            url=redacted_url(self.settings.subscribe.url),
            staged=self.staged.to.version if self.staged else None,
            head=self.newest,
            following=self.settings.follow and not self.ended,
            paused=bool(target.holds.why),
            classes=target.classes(),
            on_host=target.on_host(),
            oldest=_oldest(target.oldest, subscriber.version),
            ranks=[status_row(reply) for reply in target.ranks],
            draft=self.draft.status() if self.draft else None,
            trouble=str(self.trouble) if self.trouble else "",
            doubt=str(doubt.args[0]) if doubt else "",
            fault=self.engine_watch.fault or self.ended,
            engine=self.engine.software,
        )
        limits = HealthLimits(lag=self.settings.max_lag, silence_s=self.settings.max_silence_s)
        return judged(status, limits, self._why_waiting(status))

    def _why_waiting(self, status: Status) -> str:
        if status.version is None:
            return NOTHING_HELD
        if self.released:
            return f"asleep: the engine has released its {', '.join(sorted(self.released))}"
        if self.target.holds.why:
            return self.target.holds.why
        is_late = not (self.caught_up or status.doubt or status.pinned)
        return "it has not caught up yet" if is_late else ""

    def figures(self) -> Iterator[Figure]:
        status = self.status()
        yield from subscriber_figures(
            self.subscriber,
            self.tally,
            engine=status.engine,
            newest=status.head,
            follows=status.following,
        )
        yield from figures({"ready": status.ready, "paused": status.paused})

    @property
    def newest(self) -> Version | None:
        """Newest version that the store showed or a publisher announced; ``None`` for none."""
        chain, told = self.subscriber.opened, self._announced
        head = chain.latest if chain else None
        held = self.subscriber.version
        if told is None or (held is not None and told <= held):
            return head  # in a store that went back, older than what is held
        return told if head is None else max(head, told)

    def follow(self) -> Iterator[ApplyReceipt]:
        """Apply versions as they are committed, in the thread of the caller, until ``stop``."""
        self._watch_engine()
        try:
            yield from self.subscriber.follow(stop=self._stop, looked=self._looked)
        except (GeneratorExit, KeyboardInterrupt):  # the caller ends it
            raise
        except BaseException as exc:
            self.ended, self._has_failed = f"following ended: {exc}", True
            self._troubled(exc)
            raise

    def _follow(self) -> None:
        try:
            for _ in self.follow():
                pass  # logged by the subscriber, and part of the status
        except BaseException:  # also a panic in an extension
            logger.exception("following %s ended", redacted_url(self.settings.subscribe.url))

    def _watch_engine(self) -> None:
        if self._watching is None:
            self._watching = in_a_thread(self._watch, "deltachain-engine-watch")

    def _watch(self) -> None:
        try:
            self.engine_watch.run(self._stop)
        except errors.LeaderReplacedError as exc:
            self._troubled(exc)

    def _reach(
        self, update: Callable[[], ApplyReceipt | None], asked: Version | None
    ) -> ApplyReceipt | None:
        """Update; once more if the held version turns out unknown, or experts moved meanwhile."""
        try:
            receipt = update()
        except errors.DeltaChainError as exc:
            self._failed(exc, asked)
            if not (self.subscriber.poisoned or isinstance(exc, errors.ExpertsMovedError)):
                raise
            try:
                receipt = update()
            except errors.DeltaChainError as again:
                self._troubled(again)
                raise
        self._well()
        return receipt

    def _failed(self, exc: errors.DeltaChainError, asked: Version | None) -> None:
        """Keep the error of a failed request, unless only its version was at fault."""
        if type(exc) is errors.ChainError and asked is not None and not self.subscriber.poisoned:
            self.tally.failures += 1
        else:
            self._troubled(exc)

    def _troubled(self, exc: BaseException) -> None:
        """Keep an error for ``status``; stop serving if the replica is poisoned."""
        self.tally.failures += 1
        self.trouble = (
            exc if isinstance(exc, errors.DeltaChainError) else errors.ApplyError(repr(exc))
        )
        if isinstance(exc, errors.LeaderReplacedError):
            self.ended = str(exc.args[0])
            return
        with self.subscriber.alone():  # no healing or swap between the check and the pause
            if self.subscriber.poisoned or isinstance(exc, errors.EngineDamagedError):
                try:
                    self.target.stop_serving()
                except errors.ApplyError as failed:  # healing comes next, and this again after it
                    logger.error("the engine did not pause: %s", failed)  # noqa: TRY400
                return
            with suppress(errors.ApplyError):  # report the first error
                self._name()

    def _looked(self, exc: errors.DeltaChainError | None) -> None:
        if exc is None:
            self._well()
        else:
            self._troubled(exc)

    def _well(self) -> None:
        with self.subscriber.alone():
            self.trouble = None
            self.tally.count(self.subscriber.last)
            held, head = self.subscriber.held, self.newest
            if self.staged and held and self.staged.to.version <= held.version:
                self.staged = None  # obsolete: the ranks need not keep it
            at_head = held is not None and head is not None and held.version >= head
            self.caught_up = self.caught_up or at_head or self.subscriber.pinned
            self._name()
        if self.draft is not None and not (self.subscriber.pinned or self.released):
            self.draft.catch_up(self.subscriber.alone())

    def _name(self) -> None:
        """Label tokens with the held version, even if it is not the newest."""
        version = self.subscriber.version
        if version is not None:
            self.target.name(version)


def _oldest(named: str, held: Version | None) -> Version | None:
    """Return the oldest version in caches; ``None`` if a name is not one of a version."""
    if not named or held is None:
        return held
    return min(age(named), held) if age(named) >= 0 else None


def in_a_thread(run: Callable[[], None], name: str) -> Thread:
    thread = Thread(target=run, name=name, daemon=True)
    if not started(thread):
        raise errors.ApplyError("no thread is left", hint="let this process have more (ulimit -u)")
    return thread
