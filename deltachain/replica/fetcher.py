"""Fetchers: each fills the spool of one host with the objects of a plan."""

import logging
import secrets
import socket
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deltachain.chain.fetch import THREADS, WHOLE, Fetched, fetch_part
from deltachain.codec.decode import Range
from deltachain.errors import ApplyError
from deltachain.format.documents import ObjectRef
from deltachain.store import Store, open_store
from deltachain.threads import Pool
from deltachain.types import TensorSpec, Version

from .layout.classes import Classified, TensorClass
from .messages import RankReply, Refusal
from .spool import PROBE, Spool, SpoolIndex, make_folder, new_name, object_file

# The leader fetches for the ranks that see its own folder. Elsewhere one rank of each host does,
# from the same store, and every rank of the host reads what it has written.


_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    ranks: tuple[int, ...]  # numbers of the ranks, ascending
    is_leaders: bool  # whether the leader writes to the same folder


@contextmanager
def shown(parent: Path) -> Iterator[tuple[str, str]]:
    """Keep a probe in the folder of spools while open, and yield its name and content."""
    word = secrets.token_hex(16)
    probe = Spool.probe(parent, word)
    try:
        yield probe.folder.name, word
    finally:
        probe.close()


def sees_probe(folder: Path, word: str) -> bool:
    """Return whether this process reads the leader's probe in its own folder of spools."""
    try:
        return (folder / PROBE).read_bytes() == word.encode()
    except OSError:
        return False


def folder_id(parent: Path) -> str:
    """Return an id of the folder of spools, equal for all processes of a machine that share it."""
    make_folder(parent)
    there = parent.stat()
    try:
        machine = _BOOT.read_text().strip()
    except OSError:
        machine = socket.gethostname()
    return f"{machine}:{there.st_dev}:{there.st_ino}"


def hosts_of(found: Sequence[tuple[str, str]]) -> tuple[Host, ...]:
    """Group ranks by host, the leader's first.

    ``found`` has the host name and folder id of each rank; the id is empty for the leader's folder.
    """
    groups: dict[str, list[int]] = {}
    for number, (_, folder) in enumerate(found):
        groups.setdefault(folder, []).append(number)
    return tuple(
        Host(found[ranks[0]][0], tuple(ranks), is_leaders=not folder)
        for folder, ranks in sorted(groups.items())
    )


NOTHING: Final[Mapping[str, Range]] = {"": (0, 0)}
"""A range of no tensor: directories alone are fetched."""

logger = logging.getLogger(__name__)


def fill(
    spool: Spool, index: SpoolIndex, url: str, wanted: Mapping[str, Range] | None = None
) -> None:
    """Fetch every object of a plan, or what is wanted of it, into the spool as it arrives.

    ``wanted`` is as in :func:`fetch_part`. Ranks verify each frame that they read in any case, and
    are told if an object cannot be fetched.
    """
    refs = [one.ref for one in index.objects]

    def get(store: Store, number: int, ref: ObjectRef) -> None:
        spool.move(number, fetch_part(store, ref, wanted=wanted))

    try:
        with closing(open_store(url)) as store, Pool(min(THREADS, len(refs))) as pool:
            begun = [pool.submit(get, store, number, ref) for number, ref in enumerate(refs)]
            try:
                for one in begun:
                    one.result()
            except BaseException as exc:
                spool.fail(exc)  # at once: ranks need not wait for what is under way
                for one in begun:
                    one.cancel()
                raise
    except BaseException as exc:
        spool.fail(exc)
        raise


def receive(spool: Spool, fetched: Fetched) -> None:
    """Write every object of a plan into the leader's spool as it arrives; again does nothing."""
    try:
        for number, arrival in enumerate(fetched.arrivals):
            part = arrival.part.result()
            if not object_file(spool.folder, number).exists():
                spool.move(number, part)
    except BaseException as exc:
        spool.fail(exc)
        raise


def elements_of(fetched: Fetched, leave_out: Container[str]) -> int | None:
    """Return the number of elements that ranks must write; ``None`` if it is not known ahead.

    ``leave_out`` are names of tensors that no rank holds.
    """
    if fetched.from_nothing:
        return sum(s.numel for s in fetched.specs.values() if s.name not in leave_out)
    if len(fetched.plan.edges) > 1:
        return None  # steps may cancel
    rows = (row for part in fetched.parts for row in part.rows.values())
    return sum(row.nnz for row in rows if row.name not in leave_out)


class Fetchers:
    """The processes that fetch for a replica: the leader, and one rank of every other host."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        by_rank = {rank: host for host in hosts for rank in host.ranks}
        self._host_of = [by_rank[rank] for rank in range(len(by_rank))]
        self._failed: set[int] = set()
        for host in hosts:
            if not host.is_leaders:
                logger.info(
                    "ranks %s on %s do not see the leader's spools: rank %d fetches for them",
                    ", ".join(map(str, host.ranks)),
                    host.name,
                    host.ranks[0],
                )

    def ranks_on_host(self) -> tuple[int, ...]:
        return tuple(len(host.ranks) for host in self._host_of)

    def wanted(
        self,
        found: Sequence[Mapping[str, Classified]],
        classes: Mapping[str, TensorClass],
        specs: Mapping[str, TensorSpec],
    ) -> tuple[dict[str, Range], ...]:
        """Return the range of each tensor that the host of each rank reads; empty for all."""
        if all(host.is_leaders for host in self._hosts):
            return ()
        spans = {
            host: wanted_by([found[n] for n in host.ranks], classes, specs) for host in self._hosts
        }
        return tuple(spans[host] for host in self._host_of)

    def of_leader(self, wanted: Sequence[Mapping[str, Range]]) -> Mapping[str, Range]:
        """Return what the leader's host reads, of what all ranks want; without ranks nothing."""
        mine = (host.ranks[0] for host in self._hosts if host.is_leaders)
        return next((wanted[rank] for rank in mine), NOTHING) if wanted else {}

    def names(self) -> tuple[str, ...]:
        """Return a new name of a spool for each rank; empty on the leader's host."""
        names = {host: "" if host.is_leaders else new_name() for host in self._hosts}
        return tuple(names[host] for host in self._host_of)

    def writers(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the name of the spool that each rank writes; empty for ranks that only read."""
        hosts = (host for host in self._hosts if not host.is_leaders)
        chosen = {
            next((rank for rank in host.ranks if rank not in self._failed), host.ranks[0])
            for host in hosts
        }
        return tuple(name if rank in chosen else "" for rank, name in enumerate(names))

    def replaced(self, replies: Sequence[RankReply], version: Version) -> bool:
        """Replace fetchers that refused by other ranks of their hosts; return whether any did.

        Raises an :class:`ApplyError` if every rank of a host has failed.
        """
        refusals = {reply.rank: reply for reply in replies if isinstance(reply, Refusal)}
        self._failed |= refusals.keys()
        for host in self._hosts:
            if refusals.keys() & set(host.ranks) and self._failed >= set(host.ranks):
                last = refusals[max(refusals.keys() & set(host.ranks))]
                self._failed -= set(host.ranks)  # all are tried again for the next version
                raise ApplyError(
                    f"no rank on {host.name} could fetch: rank {last.rank}: {last.message}",
                    version=version,
                    hint=last.hint,
                )
        return bool(refusals)


def with_ties(wanted: Mapping[str, Range], ties: Iterable[tuple[str, str]]) -> Mapping[str, Range]:
    """Add what is compared with tensors that are read; see :class:`.moved_tensors.LateTie`."""
    added = {ignored: wanted[followed] for ignored, followed in ties if followed in wanted}
    return {**wanted, **added}


def wanted_by(
    ranks: Sequence[Mapping[str, Classified]],
    classes: Mapping[str, TensorClass],
    specs: Mapping[str, TensorSpec],
) -> dict[str, Range]:
    """Return the range of flat indices of each tensor that some ranks read, by name.

    Empty if that is nearly everything, for which whole objects are fetched.
    """
    found: dict[str, Range] = {}
    for rank in ranks:
        for name, one in rank.items():
            if one.kind in ("absent", "unused"):
                continue
            low, high = _span(one, specs[name], on_host=classes[name] != "in_place")
            first, last = found.get(name, (low, high))
            found[name] = min(low, first), max(high, last)
    numel = sum(high - low for low, high in found.values())
    return {} if numel > WHOLE * sum(spec.numel for spec in specs.values()) else found


def _span(one: Classified, spec: TensorSpec, *, on_host: bool) -> Range:
    if on_host or not one.windows:
        return 0, spec.numel
    spans = [
        (at, at + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)))
        for at, size, stride in one.windows
    ]
    return min(low for low, _ in spans), max(high for _, high in spans)
