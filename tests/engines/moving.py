"""Experts that an engine itself moves between slots, at any time but in a pause.

Ranks are the processes of a group. The leader of all is in the first one, which the others obey.
After each update every slot must hold the bits that the chain has of its expert.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn

from deltachain.checkpoint import WEIGHTS_FILE, read_assets
from deltachain.errors import ExpertsMovedError
from deltachain.publish import PublishConfig, Publisher
from deltachain.replica import messages
from deltachain.replica.engine import EngineModel
from deltachain.replica.leader import Leader
from deltachain.replica.rank import RankService
from deltachain.replica.settings import RankSettings, ReplicaSettings
from deltachain.subscribe import SubscribeConfig
from tests.engines.families import checkpoint
from tests.engines.matrix import copied, differences, engine_fresh, gather, live
from tests.support.engine import full_of, put
from tests.support.models import train_
from tests.support.values import present

EXPERTS: Final = 4
REDUNDANT: Final = 2
LAYERS: Final = 2

Result = TypeVar("Result")

WHEN: Final = ("between swaps", "between stage and swap", "at some request", "before a rollback")


class Ranks:
    """An engine of one rank or more, and what each of them does."""

    software = "moving"

    def __init__(
        self, known: EngineModel, model: nn.Module, move: Any, folder: Path, rank: int, ranks: int
    ) -> None:
        self.model, self.move, self.folder, self.rank, self.ranks = model, move, folder, rank, ranks
        self.service = RankService(lambda: known, rank, RankSettings(spool=folder / "spool"))
        self.dice = random.Random(43)
        self.rows = [[*range(EXPERTS), *range(REDUNDANT)]] * LAYERS
        self.moves_at = 0  # in so many requests
        self.refused = 0
        self.paused = False

    def order(self, does: str, given: Any) -> list[Any]:
        if self.ranks > 1:
            distributed.broadcast_object_list([(does, given)], src=0)
        return gather(getattr(self, does)(given), self.ranks)

    def obey(self) -> None:
        """Do what the first rank orders, until it orders nothing more."""
        while True:
            order: list[Any] = [None]
            distributed.broadcast_object_list(order, src=0)
            if order[0][0] == "end":
                return
            gather(getattr(self, order[0][0])(order[0][1]), self.ranks)

    def answer(self, text: bytes) -> str:
        return self.service.answer(text)

    def take(self, rows: list[list[int]]) -> None:
        self.rows = rows
        self.move(rows)

    def wrong(self, truth: Mapping[str, Tensor]) -> list[str]:
        """Names of slots that do not hold the bits of their expert."""
        found, stacked = [], 0
        for name, held in self.model.named_parameters():
            if not name.endswith(("w13_weight", "w2_weight")):
                continue
            stacked += 1
            layer = int(name.split(".")[2])
            for slot, one in enumerate(held):
                expert = self.rows[layer][self.rank * len(held) + slot]
                gate, up, down = (
                    truth[f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight"]
                    for kind in ("gate", "up", "down")
                )
                wanted = down if name.endswith("w2_weight") else torch.cat([gate, up])
                if not torch.equal(one.view(torch.int16), wanted.view(torch.int16)):
                    found.append(f"{name}[{slot}]")
        return found if stacked == 2 * LAYERS else ["no experts"]

    def differs(self, folder: Path) -> list[str]:
        """Names of tensors that differ from a fresh load with the same moves."""
        held = copied(live(self.model))
        how = {"rank": self.rank, "ranks": self.ranks, "redundant": REDUNDANT}
        with engine_fresh().load_moving(folder, **how) as (_, model, move):
            move(self.rows)
            return differences(copied(live(model)), held)

    def shuffle(self) -> None:
        """Have the engine move the experts of some layers."""
        rows = [list(row) for row in self.rows]
        for row in self.dice.sample(rows, self.dice.randint(1, LAYERS)):
            row[:] = [*range(EXPERTS), *self.dice.choices(range(EXPERTS), k=REDUNDANT)]
            self.dice.shuffle(row)
        self.order("take", rows)

    def call(self, request: messages.RankRequest) -> Sequence[messages.RankReply]:
        self.moves_at -= not self.paused
        if self.moves_at == 0 and not self.paused:
            self.shuffle()
        texts = self.order("answer", messages.encode(request))
        replies = [messages.decode_reply(text) for text in texts]
        self.refused += ExpertsMovedError.__name__ in {getattr(one, "error", "") for one in replies}
        return replies

    def is_dead(self) -> bool:
        return False

    def is_paused(self) -> bool:
        return self.paused

    def pause(self, *, in_doubt: bool = False) -> None:
        assert not in_doubt, "the held version is in doubt"
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def oldest(self) -> str:
        return ""

    def name_version(self, version: int) -> None: ...


def examine(rank: int, ranks: int | str, times: int | str) -> dict[str, Any]:
    """What became of as many versions, each with moves of experts; every rank must call this."""
    folder, how = checkpoint("qwen3_moe"), {"rank": rank, "ranks": int(ranks)}
    with (
        tempfile.TemporaryDirectory() as scratch,
        engine_fresh().load_moving(folder, redundant=REDUNDANT, **how) as (known, model, move),
    ):
        engine = Ranks(known, model, move, Path(scratch), **how)
        if rank:
            engine.obey()
            return {}
        return _examine(engine, folder, int(times))


def _examine(engine: Ranks, folder: Path, times: int) -> dict[str, Any]:
    trained, found = nn.Module(), Counter[str]()
    for name, tensor in load_file(folder / WEIGHTS_FILE).items():
        put(trained, name, nn.Parameter(tensor))
    url = str(engine.folder / "chain")
    publisher = Publisher(PublishConfig(url=url)).attach(trained, alone=True)
    subscribe = SubscribeConfig(url=url, poll_s=0.001)
    leader = Leader(ReplicaSettings(subscribe=subscribe, spool=engine.folder / "spool"), engine)
    leader.update()
    truth = [full_of(trained)]
    for version in range(1, times + 1):
        train_(trained, version, share=0.05)
        publisher.publish(step=version)
        publisher.flush()
        truth.append(full_of(trained))
        when = engine.dice.choice(WHEN)
        _update(leader, engine, version, when, truth)
        assert leader.subscriber.version == version
        found[when] += 1
        found["wrong"] += sum(map(len, engine.order("wrong", truth[version])))
        held = present(leader.subscriber.held)
        found["another state"] += str(leader.target.state()) != held.state
    after = engine.folder / "after"
    after.mkdir()
    for name, data in read_assets(folder).items():
        (after / name).write_bytes(data)
    save_file(truth[-1], after / WEIGHTS_FILE, metadata={"format": "pt"})
    differs = engine.order("differs", after)
    if engine.ranks > 1:
        distributed.broadcast_object_list([("end", None)], src=0)
    leader.stop()
    publisher.close()
    classes = {kind: row["tensors"] for kind, row in leader.target.classes().items()}
    return {**found, "refused": engine.refused, "differs": differs, "classes": classes}


def _update(
    leader: Leader, engine: Ranks, version: int, when: str, truth: list[dict[str, Tensor]]
) -> None:
    held = truth[version - 1]
    if when == "between stage and swap":
        leader.stage(version)
    if when == "at some request":
        engine.moves_at = engine.dice.randint(1, 16)
    else:
        engine.shuffle()
        assert not any(engine.order("wrong", held)), "the engine itself moved them"
    if when == "before a rollback" and version > 1:
        before = _persist(lambda: leader.rollback(version - 2)).version
        assert not any(engine.order("wrong", truth[before])), "wrong after a rollback"
        leader.release()
    _persist(lambda: leader.update(version))


def _persist(does: Callable[[], Result]) -> Result:
    """Do again what experts that moved twice meanwhile refused, as its caller would."""
    for _ in range(2):
        with suppress(ExpertsMovedError):
            return does()
    return does()
