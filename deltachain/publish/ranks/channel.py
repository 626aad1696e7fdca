"""The processes that publish one chain together, and how they talk: words, never weights.

Everything goes through the store of ``torch.distributed`` (a key-value store on one of the ranks),
not through collectives: a collective that timed out leaves its group unusable, whereas a rank that
was late here reads what was decided without it and is back in step.
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
    """All processes of a trainer, or the only one.

    Ranks call the same methods with the same topics in the same order in each of their threads.

    Args:
        number: Of this process.
        count: How many there are.
        deadline_s: Seconds that a rank may be behind the others.
        store: How they talk; ``None`` where there is one.

    Attributes:
        number: As given.
        count: As given.
        deadline_s: As given.
    """

    def __init__(self, number: int, count: int, deadline_s: float, store: Any = None) -> None:  # noqa: ANN401
        self.number, self.count, self.deadline_s = number, count, deadline_s
        self._store = store
        self._said: list[str] = []

    @classmethod
    def alone(cls) -> Ranks:
        """One process, which has nobody to wait for."""
        return cls(0, 1, 0.0)

    @classmethod
    def join(cls, group: dist.ProcessGroup | None = None, *, deadline_s: float) -> Ranks:
        """The ranks of a group of ``torch.distributed``, all of them by default.

        Args:
            group: This rank is in it.
            deadline_s: Seconds that a rank may be behind the others.

        Raises:
            RankError: Some rank did not come in time. Those that come again meet those that wait.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
            return cls.alone()
        number, count = dist.get_rank(group), dist.get_world_size(group)
        c10d: Any = dist.distributed_c10d
        place = f"deltachain/{'all' if group is None else group.group_name}"
        shared = c10d._get_default_store().clone()
        door = cls(number, count, deadline_s, c10d.PrefixStore(place, shared))
        return cls(number, count, deadline_s, c10d.PrefixStore(f"{place}/{door._enter()}", shared))

    def _enter(self) -> str:
        """A name for what begins here, which no earlier attempt of these ranks has."""
        mine = uuid.uuid4().hex
        knock = f"at the door/{self.number}"
        self._ask(lambda: self._store.set(knock, mine))
        try:
            if self.leads:
                return self._let_in(mine)
            answer = self._listen([f"answers/{mine}"], 3 * self.deadline_s)[0].decode()
        finally:
            self._ask(lambda: self._store.delete_key(knock))
        name, _, refusal = answer.partition(":")
        if refusal:
            raise RankError(refusal, hint=EVERY_RANK)
        return name

    def _let_in(self, name: str) -> str:
        """Answer whoever is at the door: with the name once all are there, else who is missing."""
        doors = [f"at the door/{number}" for number in range(self.count)]
        refusal = None
        try:
            self._listen(doors, self.deadline_s)
        except RankError as exc:
            refusal = RankError(str(exc.args[0]), hint=EVERY_RANK)
        for door in doors[1:]:
            if self._is_said(door):
                guest = self._ask(lambda door=door: self._store.get(door)).decode()
                answer = f"{name}:{refusal.args[0] if refusal else ''}"
                self._ask(lambda to=f"answers/{guest}", answer=answer: self._store.set(to, answer))
        if refusal is not None:
            raise refusal
        return name

    def clone(self) -> Ranks:
        """For another thread: one that waits would make the other wait too."""
        store = None if self._store is None else self._store.clone()
        return Ranks(self.number, self.count, self.deadline_s, store)

    @property
    def leads(self) -> bool:
        """Whether this is the rank that commits."""
        return self.number == 0

    def gather(self, topic: str, word: bytes) -> list[bytes]:
        """Tell the first rank something.

        Returns:
            What every rank said, in their order, on the first; nothing on the others.

        Raises:
            RankError: Some rank said nothing in time.
        """
        if self.count == 1:
            return [word]
        self._say(f"{topic}/{self.number}", word)
        if not self.leads:
            return []
        words = self._listen([f"{topic}/{number}" for number in range(self.count)], self.deadline_s)
        self._forget()  # who says this has heard what was said before
        return words

    def tell(self, topic: str, word: bytes | None) -> bytes:
        """What the first rank tells all.

        Args:
            topic: What about.
            word: On the first rank; nothing elsewhere.

        Raises:
            RankError: It said nothing in time.
        """
        if word is not None:
            if self.count > 1:
                self._say(topic, word)
            return word
        # It may itself have waited for others, and then for its store.
        word = self._listen([topic], 3 * self.deadline_s)[0]
        self._forget()
        return word

    def exchange(self, topic: str, word: bytes) -> list[bytes]:
        """What every rank says, on every rank.

        Raises:
            RankError: Some rank said nothing in time.
        """
        if self.count == 1:
            return [word]
        self._say(f"{topic}/{self.number}", word)
        return self._listen([f"{topic}/{number}" for number in range(self.count)], self.deadline_s)

    def _forget(self) -> None:
        """Delete what this rank has said: all others are known to have heard it."""
        said, self._said = self._said, []
        for key in said:
            self._ask(lambda key=key: self._store.delete_key(key))

    def _say(self, key: str, word: bytes) -> None:
        self._said.append(key)
        self._ask(lambda: self._store.set(key, word))

    def _listen(self, keys: Sequence[str], deadline_s: float) -> list[bytes]:
        try:
            self._store.wait(list(keys), timedelta(seconds=deadline_s))
        except dist.DistNetworkError as exc:
            raise RankError(f"rank {self.number} lost the others: {_first_line(exc)}") from exc
        except dist.DistStoreError as exc:
            silent = [key for key in keys if not self._is_said(key)]
            who = ", ".join(key.rpartition("/")[2] for key in silent) if len(keys) > 1 else "0"
            topic = keys[0].rpartition("/")[0] or keys[0]
            raise RankError(f"rank {who} did not answer in {deadline_s:g} s ({topic})") from exc
        if self._store.has_extended_api():  # one question for all of them
            words: list[bytes] = self._ask(lambda: self._store.multi_get(list(keys)))
            return words
        return [self._ask(lambda key=key: self._store.get(key)) for key in keys]

    def _is_said(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([key])))

    def _ask(self, question: Any) -> Any:  # noqa: ANN401 - of the store
        try:
            return question()
        except (dist.DistNetworkError, dist.DistStoreError) as exc:
            raise RankError(f"rank {self.number} lost the others: {_first_line(exc)}") from exc


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
