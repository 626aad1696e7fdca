"""Collectives over JSON values of a trainer's ranks; errors are raised on every rank.

Messages use the key-value store of ``torch.distributed`` instead of its collectives: a collective
that times out leaves its process group unusable, whereas a late rank here reads the decision made
without it and continues.
"""

import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, Self, TypeVar, cast

import msgspec
import torch.distributed as dist

from deltachain import errors
from deltachain.errors import DeltaChainError, RankError
from deltachain.format.documents import decode
from deltachain.types import Version

_T = TypeVar("_T")

EVERY_RANK: Final = "every rank makes a publisher and attaches it, whatever it holds"

SHARED: Final = (
    errors.PublisherFencedError,
    errors.ChainMismatchError,
    errors.StoreWentBackError,
    errors.ConfigError,
)
"""Errors of rank 0 raised unchanged on every rank; others become a ``RankError``."""

FAILURES: Final = (DeltaChainError, OSError, MemoryError, RuntimeError)
"""Errors of a rank that are sent to the others, such as a full disk or GPU."""


class Ranks:
    """Group of a trainer's ranks, which call the same methods and topics in the same order."""

    def __init__(self, number: int, count: int, deadline_s: float, store: Any = None) -> None:  # noqa: ANN401
        self.number, self.count = number, count
        self.deadline_s = deadline_s  # longest delay of a rank behind the others
        self._store = store
        self._posted: list[str] = []

    @classmethod
    def alone(cls) -> "Ranks":
        return cls(0, 1, 0.0)

    @classmethod
    def join(cls, group: dist.ProcessGroup | None = None, *, deadline_s: float) -> "Ranks":
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
            return cls.alone()
        number, count = dist.get_rank(group), dist.get_world_size(group)
        c10d: Any = dist.distributed_c10d
        place = f"deltachain/{'all' if group is None else group.group_name}"
        shared = c10d._get_default_store().clone()
        lobby = cls(number, count, deadline_s, c10d.PrefixStore(place, shared))
        name = lobby._rendezvous()
        return cls(number, count, deadline_s, c10d.PrefixStore(f"{place}/{name}", shared))

    def _rendezvous(self) -> str:
        """Meet all ranks on rank 0; return a group name not used by any earlier attempt."""
        mine = uuid.uuid4().hex
        join_key = f"join/{self.number}"
        self._call("set", join_key, mine)
        try:
            if self.leads:
                return self._answer_joins(mine)
            answer = self.wait([f"answers/{mine}"], 3 * self.deadline_s)[0].decode()
        finally:
            self._call("delete_key", join_key)
        name, _, refusal = answer.partition(":")
        if refusal:
            raise RankError(refusal, hint=EVERY_RANK)
        return name

    def _answer_joins(self, name: str) -> str:
        """Wait for the join key of every rank; send the group name, or the missing ranks."""
        join_keys = [f"join/{number}" for number in range(self.count)]
        refusal = ""
        try:
            self.wait(join_keys, self.deadline_s)
        except RankError as exc:
            refusal = str(exc.args[0])
        for key in join_keys[1:]:
            if self._call("check", [key]):
                joined = self._call("get", key).decode()
                self._call("set", f"answers/{joined}", f"{name}:{refusal}")
        if refusal:
            raise RankError(refusal, hint=EVERY_RANK)
        return name

    def clone(self) -> "Ranks":
        store = None if self._store is None else self._store.clone()
        return Ranks(self.number, self.count, self.deadline_s, store)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which commits."""
        return self.number == 0

    def clean_up(self) -> None:
        """Delete messages of this rank that all other ranks have certainly read."""
        posted, self._posted = self._posted, []
        for key in posted:
            self._call("delete_key", key)

    def post(self, key: str, message: bytes) -> None:
        self._posted.append(key)
        self._call("set", key, message)

    def wait(self, keys: Sequence[str], deadline_s: float) -> list[bytes]:
        try:
            self._call("wait", list(keys), timedelta(seconds=deadline_s))
        except dist.DistStoreError as exc:
            silent = [key for key in keys if not self._call("check", [key])]
            who = ", ".join(key.rpartition("/")[2] for key in silent) if len(keys) > 1 else "0"
            topic = keys[0].rpartition("/")[0] or keys[0]
            raise RankError(f"rank {who} did not answer in {deadline_s:g} s ({topic})") from exc
        if self._store.has_extended_api():  # one request for all of them
            messages: list[bytes] = self._call("multi_get", list(keys))
            return messages
        return [self._call("get", key) for key in keys]

    def _call(self, request: str, *arguments: object) -> Any:  # noqa: ANN401 - of the store
        try:
            return getattr(self._store, request)(*arguments)
        except (dist.DistNetworkError, dist.DistStoreError) as exc:
            if request == "wait" and not isinstance(exc, dist.DistNetworkError):
                raise  # of the time
            first_line = str(exc).partition("\n")[0]
            raise RankError(f"rank {self.number} is disconnected: {first_line}") from exc


class RankFailure(msgspec.Struct, frozen=True):
    kind: str
    message: str
    hint: str = ""


class Message(msgspec.Struct, frozen=True):
    value: msgspec.Raw = msgspec.Raw(b"null")
    failure: RankFailure | None = None


class Collective:
    """One collective of all ranks, as a ``with`` block: gather and broadcast, or all-gather.

    An error in the block is sent instead of the value awaited by the other ranks, so that it is
    raised on all of them: a ``RankError``, unless rank 0 has one of ``SHARED``. A single rank gets
    its own values back, without encoding. ``topic`` is a unique name.
    """

    def __init__(self, ranks: Ranks, topic: str) -> None:
        self._ranks, self._topic = ranks, topic
        self._has_sent = self._has_answered = False

    def gather(self, value: _T, kind: type[_T]) -> list[_T]:
        """Send a value to rank 0, which gets those of all ranks, in their order."""
        if self._ranks.count == 1:
            return [value]
        self._send(_encode(value))
        if not self._ranks.leads:
            return []
        messages = self._sent()
        self._ranks.clean_up()  # every sender has read all earlier messages
        return _values(messages, kind)

    def broadcast(self, value: _T | None, kind: type[_T]) -> _T:
        """Send a value of rank 0 to all ranks; that of others is ignored."""
        ranks = self._ranks
        if ranks.count > 1 and not ranks.leads:
            # Rank 0 may itself wait for other ranks, and then for its store.
            message = ranks.wait([self._topic], 3 * ranks.deadline_s)[0]
            ranks.clean_up()
            received = decode(message, Message)
            if (failure := received.failure) is None:
                return decode(received.value, kind)
            for shared in SHARED:
                if failure.kind == shared.__name__:
                    raise shared(failure.message, hint=failure.hint)
            raise RankError(f"rank 0: {failure.message}", hint=failure.hint)
        if ranks.count > 1:
            message = _encode(value)
            self._has_answered = True
            ranks.post(self._topic, message)
        return cast("_T", value)

    def all_gather(self, value: _T, kind: type[_T]) -> list[_T]:
        """Send a value to every rank; return those of all ranks in their order."""
        if self._ranks.count == 1:
            return [value]
        message = _encode(value)
        self._has_answered = True
        self._send(message)
        return _values(self._sent(), kind)

    def _send(self, message: bytes) -> None:
        self._has_sent = True
        self._ranks.post(f"{self._topic}/parts/{self._ranks.number}", message)

    def _sent(self) -> list[bytes]:
        keys = [f"{self._topic}/parts/{number}" for number in range(self._ranks.count)]
        return self._ranks.wait(keys, self._ranks.deadline_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._ranks.count == 1 or not isinstance(error, FAILURES):
            return
        failure = RankFailure(type(error).__name__, repr(error)[:500])
        if isinstance(error, DeltaChainError):
            failure = RankFailure(type(error).__name__, str(error.args[0]), error.hint)
        message = msgspec.json.encode(Message(failure=failure))
        try:
            if not self._has_sent:
                self._send(message)
                if self._ranks.leads:  # correct for gather and all-gather
                    self._sent()
        finally:
            if self._ranks.leads and not self._has_answered:
                self._ranks.post(self._topic, message)


def _encode(value: object) -> bytes:
    return msgspec.json.encode(Message(value=msgspec.Raw(msgspec.json.encode(value))))


def _values(messages: Sequence[bytes], kind: type[_T]) -> list[_T]:
    parsed = [decode(message, Message) for message in messages]
    for number, message in enumerate(parsed):
        if (failure := message.failure) is not None:
            raise RankError(f"rank {number}: {failure.message}", hint=failure.hint)
    return [decode(message.value, kind) for message in parsed]


class Decision(msgspec.Struct, frozen=True):
    go: bool  # take a diff now
    head: Version = -1


class PublishBarrier:
    """Barrier for each call of ``publish``; a rank that misses one can join the next.

    Ranks at the same step of the trainer meet. Calls without steps are counted: a rank that misses
    one then never meets the others again. ``topic`` is that of the last barrier.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._call = ""
        self._again = 0
        self._seen: Counter[int | None] = Counter()
        self.topic = ""

    def call(self, step: int | None) -> None:
        self._call, self._again = f"{step}.{self._seen[step]}", 0
        self._seen[step] += 1

    @contextmanager
    def meet(self) -> Iterator[Collective]:
        # Named after the call: a rank that missed a flush can join the next one.
        self.topic = f"{self._call}.{self._again}"
        self._again += 1
        try:
            with Collective(self._ranks, f"{self.topic}/barrier") as collective:
                yield collective
        except RankError as exc:
            exc.hint = f"{exc.hint}; every rank calls publish after the same steps"
            raise
