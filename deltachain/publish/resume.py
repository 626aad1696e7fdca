"""Beginning or continuing a chain when a publisher attaches to a model."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.fetch import Fetched, fetch
from deltachain.checkpoint import Checkpoint
from deltachain.codec import ENCODINGS
from deltachain.errors import BrokenChainError, ConfigError, FormatError, ObjectNotFoundError
from deltachain.format.documents import BaseRef, Edge
from deltachain.kernels import host
from deltachain.kernels.reference import Changes
from deltachain.publish.config import PublishConfig
from deltachain.publish.model.source import ModelTensors
from deltachain.publish.place import open_or_make
from deltachain.publish.ranks.channel import Ranks
from deltachain.publish.ranks.collectives import all_gather, all_reduce
from deltachain.publish.ranks.sharing import share
from deltachain.publish.session import EdgeShare, Session
from deltachain.publish.snapshot import WINDOW, Diff, Snapshot
from deltachain.publish.writer import Writer, take_over
from deltachain.store import Store
from deltachain.types import Bits, StateDigest

logger = logging.getLogger(__name__)


class Begun(msgspec.Struct, frozen=True):
    """Where the first rank found or made the chain."""

    epoch: int
    head: int


def begin(
    store: Store,
    walk: Callable[[], ModelTensors],
    config: PublishConfig,
    assets: Callable[[], Mapping[str, bytes]],
    ranks: Ranks,
) -> Session:
    """Make the chain, or take it over; the newest version is then the model as it is now.

    Args:
        store: Where.
        walk: Collects what this rank holds of the model.
        config: How to publish.
        assets: Collects small files for the chain; called on the first rank.
        ranks: All who publish.

    Raises:
        ChainMismatchError: The URL holds the chain of another model.
        BrokenChainError: Versions lie behind a gap, or their identity is lost.
        PublisherFencedError: Another publisher was quicker.
        ConfigError: The model does not hold the bits of the base checkpoint.
        RankError: Another rank could not do its part.
    """
    source = share(walk, ranks)
    snapshots: list[Snapshot] = []
    writers: list[Writer] = []

    def take(_: list[None]) -> Begun:
        writers.append(_take(store, source, config, assets))
        parent = writers[0].parent
        return Begun(epoch=writers[0].epoch, head=parent.version if parent else -1)

    kinds = (type(None), Begun)
    begun = all_reduce(ranks, "begin", lambda: snapshots.append(Snapshot(source)), take, kinds)

    def stand_beside() -> None:
        if not ranks.leads:
            writers.append(_beside(store, source, config, begun))

    all_gather(ranks, "beside", stand_beside, type(None))
    session = Session(source, snapshots[0], writers[0], config, ranks)
    if session.writer.parent is None:
        first_version(session)
    else:
        catch_up(session, session.writer.parent)
    return session


def _take(
    store: Store,
    source: ModelTensors,
    config: PublishConfig,
    assets: Callable[[], Mapping[str, bytes]],
) -> Writer:
    """The position of the rank that commits."""
    chain = open_or_make(store, source.table(), assets, chain_id=uuid.uuid4().hex, base=config.base)
    writer = take_over(chain, numel=source.numel, metadata=config.metadata)
    return writer or Writer(chain, numel=source.numel, metadata=config.metadata, parent=None)


def _beside(store: Store, source: ModelTensors, config: PublishConfig, begun: Begun) -> Writer:
    """The position of a rank that puts parts, and commits nothing."""
    chain = Chain.open(store)
    parent = chain.read(begun.head) if begun.head >= 0 else None
    writer = Writer(chain, numel=source.numel, metadata=config.metadata, parent=parent)
    writer.epoch = begun.epoch
    return writer


def first_version(session: Session, *, step: int | None = None) -> None:
    """Version 0: an anchor, or a reference to a checkpoint that everybody has."""
    base = session.config.base
    if base is None:
        session.commit("anchor", session.put_anchor, topic="first", step=step)
        return
    session.commit(
        "anchor",
        lambda _: EdgeShare(
            Edge(kind="anchor"), session.snapshot.state, session.source.held_numel, 0
        ),
        topic="first",
        step=step,
        edge_of=lambda shares: base_edge(base, session.source, shares),
    )


def base_edge(folder: Path, source: ModelTensors, shares: Sequence[EdgeShare]) -> Edge:
    """Version 0 as a reference to a checkpoint, once the model is proven to hold its bits.

    Raises:
        ConfigError: It does not, or the checkpoint lacks a tensor.
    """
    hint = (
        "base must be the checkpoint that the model was loaded from, before training; "
        "without it the first version is uploaded as an anchor"
    )
    checkpoint = Checkpoint(folder)
    for spec in source.specs:
        found = checkpoint.specs.get(spec.name)
        if found != spec:
            raise ConfigError(f"{folder} has {found}, the model has {spec}", hint=hint)
    state = sum((share.state for share in shares), StateDigest())
    if checkpoint.state(spec.name for spec in source.specs) != state:
        raise ConfigError(f"the model does not hold the bits of {folder}", hint=hint)
    reference = BaseRef(path=str(folder.resolve()), files=tuple(checkpoint.files()))
    return Edge(kind="base", reference=reference)


class RankDifference(msgspec.Struct, frozen=True):
    """What tells one rank's weights from those of the newest version.

    Attributes:
        state: What its weights add to the state digest.
        change: What telling them apart adds to it; nothing where the chain cannot be read.
        nbytes: About the bytes of a delta that does.
    """

    state: StateDigest
    change: StateDigest | None = None
    nbytes: int = 0


def catch_up(session: Session, head: Committed, *, step: int | None = None) -> None:
    """Publish what tells the snapshot from the newest version: a delta, or an anchor if smaller.

    Nothing, where nothing does.
    """
    own = session.snapshot.state
    states = all_gather(session.ranks, "states", lambda: own, StateDigest)
    if sum(states, StateDigest()) == head.state:
        return
    diffs: list[Diff | None] = []

    def difference() -> RankDifference:
        diffs.append(_difference(session, head))
        return _weigh(session, diffs[0])

    found = all_gather(session.ranks, "difference", difference, RankDifference)
    diff = diffs[0]
    if diff is not None and _is_proven(found, head) and _nbytes(found) < session.anchor_nbytes:
        logger.info("version %d continues from another state", head.version + 1)
        known = diff
        session.commit("delta", lambda slot: session.put_delta(slot, known), topic="up", step=step)
        return
    logger.warning("version %d starts over with an anchor", head.version + 1)
    session.commit("anchor", session.put_anchor, topic="up", step=step)


def _weigh(session: Session, diff: Diff | None) -> RankDifference:
    """What the others need to know of this rank's difference."""
    if diff is None:
        return RankDifference(session.snapshot.state)
    encoding = ENCODINGS.chosen(session.config.encoding)
    routed = session.snapshot.routed(diff)
    nbytes = sum(encoding.estimate(spec, changes) for _, spec, changes in routed)
    return RankDifference(session.snapshot.state, session.snapshot.change(diff), nbytes)


def _nbytes(found: Sequence[RankDifference]) -> int:
    return sum(one.nbytes for one in found)


def _is_proven(found: Sequence[RankDifference], head: Committed) -> bool:
    """Whether every rank could read the newest version, and it was what its manifest says."""
    changes = [one.change for one in found if one.change is not None]
    if len(changes) < len(found):
        return False
    states = sum((one.state for one in found), StateDigest())
    if head.state + sum(changes, StateDigest()) != states:
        logger.warning("version %d in the store is not what its manifest says", head.version)
        return False
    return True


def _difference(session: Session, head: Committed) -> Diff | None:
    """What tells the snapshot from the newest version; ``None`` where that cannot be read."""
    chain, config = session.writer.chain, session.config
    try:
        fetched = fetch(chain, chain.plan(None, head), base=config.base)
        return dict(_compare(fetched, session.source, session.snapshot))
    except (BrokenChainError, ObjectNotFoundError, FormatError, ConfigError) as exc:
        logger.warning("version %d cannot be rebuilt from the store: %s", head.version, exc)
        return None


def _compare(
    fetched: Fetched, source: ModelTensors, snapshot: Snapshot
) -> Iterator[tuple[str, Changes]]:
    """What tells the snapshot from the weights that a plan from nothing gives."""
    for weight in source.weights:
        bits = snapshot.bits(weight)
        then = np.empty_like(bits)
        values, read = bits, ""
        for window in weight.route.windows(WINDOW):
            if window.spec.name != read:
                values, read = _all_of(fetched, window.spec.name), window.spec.name
            places = window.indices
            there = slice(places.start, places.stop) if isinstance(places, range) else places
            then[window.select] = values[there]
        changes = host.diff_(then, bits)
        if changes.indices.size:
            yield weight.spec.name, changes


def _all_of(fetched: Fetched, name: str) -> Bits:
    delta = fetched.read(name)
    if not delta.is_dense:
        raise BrokenChainError(f"{name}: the chain does not give the whole tensor")
    return delta.values
