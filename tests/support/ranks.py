"""A fake engine: its ranks in one process, its scheduler, and injected faults of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from deltachain.errors import ApplyError, DeltaChainError
from deltachain.replica.messages import (
    RankReply,
    RankRequest,
    Refusal,
    SwapRequest,
    addressed,
    decode_reply,
    encode,
    name_of,
)
from deltachain.replica.rank import RankService
from deltachain.replica.settings import RankSettings
from deltachain.subscribe.targets import base as target
from deltachain.subscribe.targets.patch import LiveElements, Patch, write
from tests.support.engine import FakeModel, bytes_of
from tests.support.sharding import Full, Sharding


@dataclass
class Faults:
    """Injected faults, which last until they are removed.

    Attributes:
        refuses: Error with which a rank refuses a call, by rank and name of the call.
        dies: Calls from which a rank does not return, and whether it handles them first.
        shifted: Calls whose replies arrive in another order.
        fewer: Calls without a reply of the last rank.
        stale: Calls to which the last rank sends its reply to the preceding call.
        mistyped: Calls to which the last rank's reply has the type and fields of another one.
        truncated: Calls to which the last rank's reply is truncated.
        writes: Error of a rank's half-done write, by rank, ``write`` or ``take back``, and its
            number among those of one call; raised once each.
        name: Error of naming a version.
        pause: Error of pausing.
    """

    refuses: dict[tuple[int, str], DeltaChainError] = field(default_factory=dict)
    dies: dict[str, bool] = field(default_factory=dict)
    shifted: set[str] = field(default_factory=set)
    fewer: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    mistyped: dict[str, RankReply] = field(default_factory=dict)
    truncated: set[str] = field(default_factory=set)
    writes: dict[tuple[int, str, int], Exception] = field(default_factory=dict)
    name: DeltaChainError | None = None
    pause: DeltaChainError | None = None


class FakeEngine:
    """A fake :class:`deltachain.replica.engine.Engine`, which refuses writes unless paused."""

    def __init__(self, shape: Sharding, checkpoint: Path, spool: Path, url: str = "") -> None:
        self.models = [FakeModel(shape, rank, checkpoint) for rank in range(shape.ranks)]
        settings = RankSettings(spool=spool, url=url)
        self.services = [
            RankService(lambda model=model: model, number, settings)  # type: ignore[misc]
            for number, model in enumerate(self.models)
        ]
        self.faults = Faults()
        self.software = "fake/1.0"
        self.events: list[str] = []
        self.paused = self.dead = False
        self._before: list[str] = []

    def call(self, request: RankRequest) -> Sequence[RankReply]:
        name = name_of(request)
        if isinstance(request, SwapRequest):
            assert self.paused, "weights are written while the engine runs"
            self.events.append("take back" if request.back else "write")
        if self.faults.dies.get(name) is False:
            raise ApplyError(f"the engine did not answer {name!r}")
        replies = [self._send(rank, request) for rank in range(len(self.services))]
        if name in self.faults.dies:
            raise ApplyError(f"the engine did not answer {name!r}")
        return self._received(name, replies)

    def _received(self, name: str, replies: list[str]) -> Sequence[RankReply]:
        faults = self.faults
        if name in faults.shifted:
            replies = replies[1:] + replies[:1]
        if name in faults.fewer:
            replies = replies[:-1]
        before, self._before = self._before, replies
        if name in faults.stale:
            replies = [*replies[:-1], before[-1]]
        if name in faults.truncated:
            replies = [*replies[:-1], replies[-1][: len(replies[-1]) // 2]]
        found: list[RankReply] = [decode_reply(text) for text in replies]
        if name in faults.mistyped:
            found[-1] = addressed(faults.mistyped[name], found[-1].rank, found[-1])
        return found

    def _send(self, rank: int, request: RankRequest) -> str:
        refusal = self.faults.refuses.get((rank, name_of(request)))
        if refusal is not None:
            reply = Refusal(error=type(refusal).__name__, message=str(refusal.args[0]))
            return encode(addressed(reply, rank, request))
        with self._failing_writes(rank):
            return self.services[rank].answer(encode(request))

    @contextmanager
    def _failing_writes(self, rank: int) -> Iterator[None]:
        number = 0

        def write_or_fail(live: LiveElements, patch: Patch) -> None:
            nonlocal number
            number += 1
            failure = self.faults.writes.pop((rank, self.events[-1], number), None)
            if failure is None:
                write(live, patch)
                return
            if patch.indices is not None and len(patch.indices):
                storage: Any = live.storage
                storage[patch.indices[0]] = patch.new[0]  # half done
            raise failure

        with mock.patch.object(target, "write_patch", write_or_fail):
            yield

    def is_dead(self) -> bool:
        return self.dead

    def is_paused(self) -> bool:
        return self.paused

    def pause(self, *, in_doubt: bool = False) -> None:
        self.events.append("pause in doubt" if in_doubt else "pause")
        if self.faults.pause is not None:
            raise self.faults.pause
        self.paused = True

    def resume(self) -> None:
        self.events.append("resume")
        self.paused = False

    def name_version(self, version: int) -> None:
        self.events.append(f"name {version}")
        if self.faults.name is not None:
            raise self.faults.name

    def holds(self, full: Full) -> bool:
        return all(model.holds(full) for model in self.models)

    def bits(self) -> list[dict[str, bytes]]:
        return [
            {name: bytes_of(tensor).numpy().tobytes() for name, tensor in model.computed().items()}
            for model in self.models
        ]
