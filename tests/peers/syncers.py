"""``python -m tests.peers.syncers``: the weight syncers of RLinf and ours, in the same cases.

One process on a CPU: messages pass by reference, and the host stands in for the card that ``patch``
asks for. ``patch`` sends its start to all receivers, as ``init_sync`` does.
"""

import asyncio
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias
from unittest import mock

import torch
from torch import Tensor, nn

KINDS: Final = ("bucket", "patch", "deltachain")
RECEIVERS: Final = 8
SYNCS: Final = 12
SIZE: Final = 1024
WAIT_S: Final = 5.0  # for an answer of the other side, which never comes
BF16, F32 = torch.bfloat16, torch.float32
Dtypes: TypeAlias = tuple[torch.dtype, torch.dtype]
SETTINGS: Final = {
    "bucket": {"bucket_size": 1 << 30, "bucket_dtype": None, "bucket_device": "cpu"},
    "patch": {"transport_device": "cpu", "init_sync": {"enabled": True}},
}


class Policy(nn.Sequential):
    """Two layers, each of a dtype; 2.1 M elements."""

    def __init__(self, seed: int, dtypes: Dtypes = (BF16, BF16)) -> None:
        torch.manual_seed(seed)
        super().__init__(*(nn.Linear(SIZE, SIZE, bias=False).to(one) for one in dtypes))

    @torch.no_grad()
    def train_step(self, number: int) -> None:
        """Change one of a hundred elements; a zero then has the other sign, and one is a NaN."""
        generator = torch.Generator().manual_seed(number)
        for weight in self.parameters():
            flat = weight.view(-1)
            where = torch.randperm(SIZE * SIZE, generator=generator)[: SIZE * SIZE // 100]
            flat[where] *= 1.25
            flat[:2] = torch.tensor([0.0 if number % 2 else -0.0, torch.nan])


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.int16 if tensor.dtype == BF16 else torch.int32)


def wrong(sender: Policy, receiver: Policy) -> int:
    """Elements that are not the sender's, cast to the receiver's dtype."""
    pairs = zip(sender.parameters(), receiver.parameters(), strict=True)
    return sum(int((bits(one) != bits(own.to(one.dtype))).sum()) for own, one in pairs)


class Link:
    """RLinf's broadcast, and its answers to the sender."""

    def __init__(self) -> None:
        self.queues: list[asyncio.Queue[Any]] = []
        self.answers = asyncio.Queue[Any]()
        self.nbytes = 0

    async def send(self, message: Any) -> None:
        self.nbytes += _nbytes(message)
        for queue in self.queues:
            queue.put_nowait(copy.copy(message))  # receivers of buckets change theirs


def _nbytes(message: Any) -> int:
    if "url" in getattr(message, "keys", list)():
        return len(json.dumps(message))
    found = message.values() if isinstance(message, dict) else message.tensors()
    return sum(one.nbytes for one in found)


class Receiver:
    def __init__(self, syncer: Any, link: Link, policy: Policy) -> None:
        self.syncer, self.link, self.policy = syncer, link, policy
        self.queue = asyncio.Queue[Any]()
        link.queues.append(self.queue)

    async def join(self) -> None:
        send = self.link.answers.put
        await self.syncer.init_receiver(self.policy.state_dict(), self.queue.get, send)

    async def apply(self) -> float:
        start = time.perf_counter()
        await self.syncer.apply(self.policy, self.queue.get)
        return time.perf_counter() - start


class Fleet:
    """A sender, its receivers, and how long they took."""

    def __init__(self, kind: str, url: Path, sender: Dtypes, receivers: Sequence[Dtypes]) -> None:
        self.kind, self.url, self.link, self.number = kind, url, Link(), 0
        self.policy, self.syncer = Policy(0, sender), self.make()
        self.receivers = [
            Receiver(self.make(), self.link, Policy(9, dtypes)) for dtypes in receivers
        ]

    def make(self) -> Any:
        if self.kind == "deltachain":
            from deltachain.integrations.rlinf import DeltaChainWeightSyncer  # noqa: PLC0415

            return DeltaChainWeightSyncer(str(self.url))
        from omegaconf import OmegaConf  # noqa: PLC0415
        from rlinf.hybrid_engines.weight_syncer import WeightSyncer  # noqa: PLC0415

        settings = {"type": self.kind, self.kind: SETTINGS[self.kind]}
        return WeightSyncer.create(OmegaConf.create(settings))

    async def start(self) -> None:
        joining = [asyncio.create_task(one.join()) for one in self.receivers]
        await self.send_start()
        await asyncio.gather(*joining)

    async def send_start(self) -> None:
        names = [name for name, _ in self.policy.named_parameters()]
        link = self.link
        await self.syncer.init_sender(self.policy.state_dict(), names, link.send, link.answers.get)

    async def sync(self) -> tuple[float, list[float]]:
        """Train and sync once; return the seconds of the sender, and of each receiver."""
        self.number += 1
        self.policy.train_step(self.number)
        start = time.perf_counter()
        await self.syncer.sync(self.policy.state_dict(), self.link.send, self.number)
        took = time.perf_counter() - start
        return took, [await one.apply() for one in self.receivers]

    def wrong(self) -> int:
        return max(wrong(self.policy, one.policy) for one in self.receivers)

    def close(self) -> None:
        publisher = getattr(self.syncer, "_publisher", None)
        if publisher is not None:
            publisher.close()


def verdict(found: int) -> str:
    return f"{found:,} wrong" if found else "right"


def _stored(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


async def eight(kind: str, url: Path) -> list[str]:
    """Bytes and seconds of a sync, and whether all receivers were right after each."""
    fleet = Fleet(kind, url, (BF16, BF16), [(BF16, BF16)] * RECEIVERS)
    await fleet.start()
    sent, took, applied, found = list[int](), list[float](), list[float](), list[int]()
    for _ in range(SYNCS):
        before = fleet.link.nbytes + _stored(url)
        seconds, each = await fleet.sync()
        sent.append(fleet.link.nbytes + _stored(url) - before)
        took.append(seconds)
        applied += each
        found.append(fleet.wrong())
    fleet.close()
    spent = [f"{statistics.median(some[2:]) * 1e3:.1f} ms" for some in (took, applied)]
    return [f"{int(statistics.median(sent[2:])):,}", *spent, verdict(max(found))]


async def late(kind: str, url: Path) -> list[str]:
    """A receiver that joins a run, or returns to it, with the weights that the run began with."""
    fleet = Fleet(kind, url, (BF16, BF16), [(BF16, BF16)])
    await fleet.start()
    for _ in range(3):
        await fleet.sync()
    fleet.receivers = [Receiver(fleet.make(), fleet.link, Policy(0))]
    fleet.link.queues = [fleet.receivers[0].queue]
    joined = await _answered(fleet.receivers[0].join())
    early = fleet.wrong() == 0
    await fleet.sync()
    found = verdict(fleet.wrong())
    fleet.close()
    when = "" if early else " after a sync"
    return [f"{found}{when}" if joined else f"waits; then {found}"]


async def _answered(awaited: Any) -> bool:
    try:
        await asyncio.wait_for(awaited, WAIT_S)
    except TimeoutError:
        return False
    return True


async def restarted(kind: str, url: Path) -> list[str]:
    """A sender that starts again from an earlier checkpoint, while its receivers go on."""
    fleet = Fleet(kind, url, (BF16, BF16), [(BF16, BF16)] * 2)
    await fleet.start()
    for _ in range(3):
        await fleet.sync()
    fleet.close()
    fleet.policy, fleet.syncer, fleet.link.answers = Policy(0), fleet.make(), asyncio.Queue()
    fleet.policy.train_step(1)
    if not await _answered(fleet.send_start()):
        return ["waits"]
    await fleet.sync()
    found = fleet.wrong()
    fleet.close()
    return [verdict(found)]


MIXED: Final[dict[str, tuple[Dtypes, list[Dtypes]]]] = {
    "bf16 to fp32": ((BF16, BF16), [(F32, F32)] * 2),
    "fp32 to bf16": ((F32, F32), [(BF16, BF16)] * 2),
    "mixed": ((BF16, F32), [(F32, BF16)] * 2),
    "different dtypes": ((BF16, F32), [(BF16, BF16), (F32, F32)]),
}


async def mixed(kind: str, url: Path) -> list[str]:
    """Other dtypes than the sender's, the last ones another in each receiver."""
    found = []
    for name, (sender, receivers) in MIXED.items():
        fleet, worst = Fleet(kind, url / name, sender, receivers), 0
        await fleet.start()
        try:
            for _ in range(3):
                await fleet.sync()
                worst = max(worst, fleet.wrong())
            found.append(verdict(worst))
        except RuntimeError as error:  # of torch, in theirs
            found.append(str(error).partition(":")[0])
        fleet.close()
    return found


MEASURED: Final = ("bytes of a sync", "the sender's time", "a receiver's time")
CASES: Final = ("8 receivers", "late or restarted receiver", "restarted sender", *MIXED)


def run(kind: str, folder: Path) -> dict[str, str]:
    """Run all cases with a kind of syncer; return a cell of each row."""
    from rlinf.hybrid_engines.weight_syncer import patch_syncer  # noqa: PLC0415
    from rlinf.scheduler import Worker  # noqa: PLC0415

    stream = SimpleNamespace(synchronize=lambda: None)
    platform = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 0)
    platform.current_stream = lambda *_: stream
    on_card = patch_syncer.GPUSnapshotPatchBuilder
    with (
        mock.patch.object(Worker, "torch_device_type", "cpu"),
        mock.patch.object(Worker, "torch_platform", platform),
        mock.patch.object(Tensor, "pin_memory", lambda one: one),
        mock.patch.object(patch_syncer, "CPUSnapshotPatchBuilder", on_card),
    ):
        found = [
            one
            for case in (eight, late, restarted, mixed)
            for one in asyncio.run(case(kind, folder / case.__name__))
        ]
    return dict(zip((*MEASURED, *CASES), found, strict=True))


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = [run(kind, Path(folder, kind)) for kind in KINDS]
    rows = [("", *KINDS), ("---",) * (1 + len(KINDS))]
    rows += [(name, *(one[name] for one in found)) for name in (*MEASURED, *CASES)]
    sys.stdout.writelines(f"| {' | '.join(cells)} |\n" for cells in rows)


if __name__ == "__main__":
    main()
