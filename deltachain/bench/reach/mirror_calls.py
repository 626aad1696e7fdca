"""Requests of a mirror, counted on the real one with a small chain."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from deltachain.bench.reach.sized_store import Requests, SizedStore
from deltachain.mirror.mirror import SURVEY, Mirror
from deltachain.publish import PublishConfig, Publisher
from deltachain.store.memory import MemoryStore

ROUNDS: Final = SURVEY // 2
"""Rounds counted of each kind: together as many as from one listing of a mirror to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorCalls:
    """Mean requests of a mirror in one round.

    Attributes:
        poll_reads: Reads of a round without a new version, of both stores.
        poll_writes: Writes and lists of such a round.
        version_reads: Reads of a round that copies a version of one part, of both stores.
        version_writes: Writes and lists of such a round.
        in_row: Reads of the source that wait for one another, until the first object is copied.
    """

    poll_reads: float
    poll_writes: float
    version_reads: float
    version_writes: float
    in_row: float


def count_mirror_calls() -> MirrorCalls:
    """Mirror a chain of small versions, each followed by a round without one."""
    name = f"reach-{secrets.token_hex(4)}"
    published, source, there = MemoryStore.named(name), SizedStore("source"), SizedStore("mirror")
    model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    mirror = Mirror(source, there)
    copied, idle = Requests(), Requests()
    config = PublishConfig(url=f"memory://{name}", dtype="BF16")
    with Publisher(config).attach(model, assets={}) as publisher:
        _copy(published, source)
        list(mirror.catch_up())
        for step in range(ROUNDS):
            with torch.no_grad():
                model.weight.view(torch.int16)[step % 8] += 1
            publisher.publish(step=step)
            publisher.flush()
            _copy(published, source)
            for total in (copied, idle):
                before = source.spent(), there.spent()
                list(mirror.catch_up())
                of_source, of_mirror = source.spent() - before[0], there.spent() - before[1]
                total.reads += of_source.reads + of_mirror.reads
                total.writes += of_source.writes + of_mirror.writes
                total.in_row += of_source.in_row
    for info in list(published.list()):
        published.delete(info.key)
    return MirrorCalls(
        poll_reads=idle.reads / ROUNDS,
        poll_writes=idle.writes / ROUNDS,
        version_reads=copied.reads / ROUNDS,
        version_writes=copied.writes / ROUNDS,
        in_row=copied.in_row / ROUNDS,
    )


def _copy(published: MemoryStore, source: SizedStore) -> None:
    """Put what was published into the source, without counting it."""
    before = source.spent()
    for info in published.list():
        data = published.get(info.key)
        known = source.find(info.key)
        if known is None or source.get(info.key) != data:
            source.put(info.key, data)
    source.counted = before
