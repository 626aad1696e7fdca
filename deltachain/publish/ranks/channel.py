"""Small messages between the publishing ranks of a trainer; never weights.

Messages use the key-value store of ``torch.distributed`` instead of its collectives: a collective
that times out leaves its process group unusable, whereas a late rank here reads the decision made
without it and continues.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from deltachain.errors import RankError

EVERY_RANK: Final = "every rank makes a publisher and attaches it, whatever it holds"


class Ranks:
    """Group of a trainer's ranks, or a single process.

    Every rank calls the same methods, with the same topics, in the same order in each thread.

    Args:
        number: Rank of this process.
        count: Number of ranks.
        deadline_s: Longest delay of a rank behind the others, in seconds.
        store: Shared key-value store; ``None`` for a single process.

    Attributes:
        number: Rank of this process.
        count: Number of ranks.
        deadline_s: Longest delay of a rank behind the others, in seconds.
    """

    def __init__(self, number: int, count: int, deadline_s: float, store: Any = None) -> None:  # noqa: ANN401
        self.number, self.count, self.deadline_s = number, count, deadline_s
        self._store = store
        self._posted: list[str] = []

    @classmethod
    def alone(cls) -> Ranks:
        """Return the group of a single process."""
        return cls(0, 1, 0.0)

    @classmethod
    def join(cls, group: dist.ProcessGroup | None = None, *, deadline_s: float) -> Ranks:
        """Join the ranks of a ``torch.distributed`` group, all ranks by default.

        Args:
            group: Process group that contains this rank.
            deadline_s: Longest delay of a rank behind the others, in seconds.

        Raises:
            RankError: A rank did not join in time. Ranks that join again meet waiting ones.
        """
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
        self._call(lambda: self._store.set(join_key, mine))
        try:
            if self.leads:
                return self._answer_joins(mine)
            answer = self._wait([f"answers/{mine}"], 3 * self.deadline_s)[0].decode()
        finally:
            self._call(lambda: self._store.delete_key(join_key))
        name, _, refusal = answer.partition(":")
        if refusal:
            raise RankError(refusal, hint=EVERY_RANK)
        return name

    def _answer_joins(self, name: str) -> str:
        """Wait for the join key of every rank; send the group name, or the missing ranks."""
        join_keys = [f"join/{number}" for number in range(self.count)]
        refusal = None
        try:
            self._wait(join_keys, self.deadline_s)
        except RankError as exc:
            refusal = RankError(str(exc.args[0]), hint=EVERY_RANK)
        for key in join_keys[1:]:
            if self._is_posted(key):
                joined = self._call(lambda key=key: self._store.get(key)).decode()
                answer = f"{name}:{refusal.args[0] if refusal else ''}"
                self._call(
                    lambda to=f"answers/{joined}", answer=answer: self._store.set(to, answer)
                )
        if refusal is not None:
            raise refusal
        return name

    def clone(self) -> Ranks:
        """Return a copy for another thread, since a waiting thread would block others."""
        store = None if self._store is None else self._store.clone()
        return Ranks(self.number, self.count, self.deadline_s, store)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which commits."""
        return self.number == 0

    def gather(self, topic: str, message: bytes) -> list[bytes]:
        """Send a message to rank 0.

        Returns:
            The messages of all ranks in their order, on rank 0; an empty list on the others.

        Raises:
            RankError: A rank sent nothing in time.
        """
        if self.count == 1:
            return [message]
        self._post(f"{topic}/{self.number}", message)
        if not self.leads:
            return []
        messages = self._wait(self._keys(topic), self.deadline_s)
        self._clean_up()  # every sender has read all earlier messages
        return messages

    def broadcast(self, topic: str, message: bytes | None) -> bytes:
        """Send a message of rank 0 to all ranks.

        Args:
            topic: Name of this broadcast.
            message: On rank 0; ``None`` on the others.

        Raises:
            RankError: Rank 0 sent nothing in time.
        """
        if message is not None:
            if self.count > 1:
                self._post(topic, message)
            return message
        # Rank 0 may itself wait for other ranks, and then for its store.
        message = self._wait([topic], 3 * self.deadline_s)[0]
        self._clean_up()
        return message

    def all_gather(self, topic: str, message: bytes) -> list[bytes]:
        """Exchange a message with all ranks; return the messages in the order of ranks.

        Raises:
            RankError: A rank sent nothing in time.
        """
        if self.count == 1:
            return [message]
        self._post(f"{topic}/{self.number}", message)
        return self._wait(self._keys(topic), self.deadline_s)

    def _keys(self, topic: str) -> list[str]:
        return [f"{topic}/{number}" for number in range(self.count)]

    def _clean_up(self) -> None:
        """Delete messages of this rank that all other ranks have certainly read."""
        posted, self._posted = self._posted, []
        for key in posted:
            self._call(lambda key=key: self._store.delete_key(key))

    def _post(self, key: str, message: bytes) -> None:
        self._posted.append(key)
        self._call(lambda: self._store.set(key, message))

    def _wait(self, keys: Sequence[str], deadline_s: float) -> list[bytes]:
        try:
            self._store.wait(list(keys), timedelta(seconds=deadline_s))
        except dist.DistNetworkError as exc:
            raise RankError(f"rank {self.number} is disconnected: {_first_line(exc)}") from exc
        except dist.DistStoreError as exc:
            silent = [key for key in keys if not self._is_posted(key)]
            who = ", ".join(key.rpartition("/")[2] for key in silent) if len(keys) > 1 else "0"
            topic = keys[0].rpartition("/")[0] or keys[0]
            raise RankError(f"rank {who} did not answer in {deadline_s:g} s ({topic})") from exc
        if self._store.has_extended_api():  # one request for all of them
            messages: list[bytes] = self._call(lambda: self._store.multi_get(list(keys)))
            return messages
        return [self._call(lambda key=key: self._store.get(key)) for key in keys]

    def _is_posted(self, key: str) -> bool:
        return bool(self._call(lambda: self._store.check([key])))

    def _call(self, request: Any) -> Any:  # noqa: ANN401 - of the store
        try:
            return request()
        except (dist.DistNetworkError, dist.DistStoreError) as exc:
            raise RankError(f"rank {self.number} is disconnected: {_first_line(exc)}") from exc


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
