"""The ranks of an engine in one process, its scheduler, and what goes wrong with either."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from deltachain.errors import ApplyError, DeltaChainError
from deltachain.replica.rpc import RankReply, RankVerbs
from deltachain.subscribe.targets import base as target
from deltachain.subscribe.targets.live import LiveElements
from deltachain.subscribe.targets.patch import Patch, write
from deltachain.testing.engine import FakeModel, bytes_of
from deltachain.testing.sharding import Full, Sharding


@dataclass
class Faults:
    """What goes wrong, until it is taken out.

    Attributes:
        refuses: What a rank answers to a verb instead of doing it, by rank and verb.
        dies: Verbs that some rank does not come back from, and whether it does them first.
        shifted: Verbs whose answers come in another order.
        fewer: Verbs that the last rank gives no answer to.
        stale: Verbs that the last rank answers with its answer to the call before.
        writes: What a rank's write raises, half done, by rank, ``write`` or ``take back``, and its
            number among those of one verb; once each.
        name: What naming a version raises.
        pause: What pausing raises.
    """

    refuses: dict[tuple[int, str], DeltaChainError] = field(default_factory=dict)
    dies: dict[str, bool] = field(default_factory=dict)
    shifted: set[str] = field(default_factory=set)
    fewer: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    writes: dict[tuple[int, str, int], Exception] = field(default_factory=dict)
    name: DeltaChainError | None = None
    pause: DeltaChainError | None = None


class FakeEngine:
    """See :class:`deltachain.replica.engine.Engine`; refuses to be written to while it runs.

    Args:
        shape: How many ranks, and what each has.
        checkpoint: The folder that they load.
        spool: The folder that they read plans from.
        url: The chain that they were started to follow.

    Attributes:
        models: Of the ranks.
        faults: What goes wrong.
        events: What it was asked to do to its scheduler and its weights, oldest first.
    """

    def __init__(self, shape: Sharding, checkpoint: Path, spool: Path, url: str = "") -> None:
        self.models = [FakeModel(shape, rank, checkpoint) for rank in range(shape.ranks)]
        self.verbs = [
            RankVerbs(lambda model=model: model, number, spool, url)  # type: ignore[misc]
            for number, model in enumerate(self.models)
        ]
        self.faults = Faults()
        self.events: list[str] = []
        self.paused = False
        self._before: list[RankReply] = []

    def call(self, verb: str, **arguments: Any) -> Sequence[Mapping[str, Any]]:  # noqa: ANN401
        """Ask every rank, by way of JSON."""
        sent = json.dumps(arguments)
        if verb == "swap":
            assert self.paused, "weights are written while the engine runs"
            self.events.append("take back" if arguments["back"] else "write")
        if self.faults.dies.get(verb) is False:
            raise ApplyError(f"the engine did not answer {verb!r}")
        answers = [self._ask(rank, verb, json.loads(sent)) for rank in range(len(self.verbs))]
        if verb in self.faults.dies:
            raise ApplyError(f"the engine did not answer {verb!r}")
        if verb in self.faults.shifted:
            answers = answers[1:] + answers[:1]
        if verb in self.faults.fewer:
            answers = answers[:-1]
        before, self._before = self._before, answers
        if verb in self.faults.stale:
            answers = [*answers[:-1], before[-1]]
        found: list[RankReply] = json.loads(json.dumps(answers))
        return found

    def _ask(self, rank: int, verb: str, arguments: dict[str, Any]) -> RankReply:
        refusal = self.faults.refuses.get((rank, verb))
        if refusal is not None:
            kind = type(refusal).__name__
            turn = arguments["turn"]
            message = refusal.args[0]
            return {"ok": False, "rank": rank, "turn": turn, "error": kind, "message": message}
        with self._failing_writes(rank):
            return self.verbs[rank].do(verb, arguments)

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

    def is_paused(self) -> bool:
        """Whether it was."""
        return self.paused

    def pause(self, *, in_doubt: bool = False) -> None:
        """Stop generating."""
        self.events.append("pause in doubt" if in_doubt else "pause")
        if self.faults.pause is not None:
            raise self.faults.pause
        self.paused = True

    def resume(self) -> None:
        """Generate again."""
        self.events.append("resume")
        self.paused = False

    def name_version(self, version: int) -> None:
        """Name the version that is held."""
        self.events.append(f"name {version}")
        if self.faults.name is not None:
            raise self.faults.name

    def holds(self, full: Full) -> bool:
        """Whether every rank computes from exactly these weights."""
        return all(model.holds(full) for model in self.models)

    def bits(self) -> list[dict[str, bytes]]:
        """A copy of the bits that every rank computes from."""
        return [
            {name: bytes_of(tensor).numpy().tobytes() for name, tensor in model.computed().items()}
            for model in self.models
        ]
