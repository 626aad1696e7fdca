"""Beginning or continuing a chain when a publisher attaches to a model."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from deltachain.chain import Chain, Committed
from deltachain.checkpoint import Checkpoint
from deltachain.errors import BrokenChainError, ConfigError, FormatError, ObjectNotFoundError
from deltachain.fetch import Fetched, fetch
from deltachain.kernels import host
from deltachain.kernels.reference import Changes
from deltachain.manifest import BaseRef, Edge
from deltachain.publish.config import PublishConfig
from deltachain.publish.session import Session, slot_of
from deltachain.publish.snapshot import Diff, Snapshot
from deltachain.publish.source import Source
from deltachain.publish.upload import sparse_nbytes
from deltachain.publish.writer import Writer, take_over
from deltachain.store import Store

logger = logging.getLogger(__name__)


def begin(
    store: Store, source: Source, config: PublishConfig, assets: Mapping[str, bytes]
) -> Session:
    """Make the chain, or take it over; the newest version is then the model as it is now.

    Raises:
        ChainMismatchError: The URL holds the chain of another model.
        PublisherFencedError: Another publisher was quicker.
        ConfigError: The model does not hold the bits of the base checkpoint.
    """
    snapshot = Snapshot(source)
    chain = Chain.create(
        store, source.table(), chain_id=uuid.uuid4().hex, time=time.time(), assets=assets
    )
    numel = sum(weight.spec.numel for weight in source.weights)
    writer = take_over(chain, numel=numel, metadata=config.metadata)
    if writer is None:
        writer = Writer(chain, numel=numel, metadata=config.metadata, parent=None)
    session = Session(source, snapshot, writer, config)
    if writer.parent is None:
        first_version(session)
    elif writer.parent.state != snapshot.state:
        catch_up(session, writer.parent)
    return session


def first_version(session: Session, *, step: int | None = None) -> None:
    """Version 0: an anchor, or a reference to a checkpoint that everybody has."""
    base = session.config.base
    draft = session.writer.draft(state=session.snapshot.state, step=step, nnz=session.numel)
    if base is None:
        edge = session.put_anchor(slot_of("anchor", draft))
    else:
        edge = base_edge(base, session.source, session.snapshot)
    session.writer.commit(draft, edge)


def base_edge(folder: Path, source: Source, snapshot: Snapshot) -> Edge:
    """Version 0 as a reference to a checkpoint, once the model is proven to hold its bits.

    Raises:
        ConfigError: It does not, or the checkpoint lacks a tensor.
    """
    hint = (
        "base must be the checkpoint that the model was loaded from, before training; "
        "without it the first version is uploaded as an anchor"
    )
    checkpoint = Checkpoint(folder)
    for weight in source.weights:
        found = checkpoint.specs.get(weight.spec.name)
        if found != weight.spec:
            raise ConfigError(f"{folder} has {found}, the model has {weight.spec}", hint=hint)
    if checkpoint.state(weight.spec.name for weight in source.weights) != snapshot.state:
        raise ConfigError(f"the model does not hold the bits of {folder}", hint=hint)
    reference = BaseRef(path=str(folder.resolve()), files=tuple(checkpoint.files()))
    return Edge(kind="base", reference=reference)


def catch_up(session: Session, head: Committed, *, step: int | None = None) -> None:
    """Publish what tells the snapshot from the newest version: a delta, or an anchor if smaller."""
    diff = _difference(session, head)
    nnz = session.numel if diff is None else sum(c.indices.size for c in diff.values())
    draft = session.writer.draft(state=session.snapshot.state, step=step, nnz=nnz)
    if diff is None:
        logger.warning("version %d starts over with an anchor", draft.version)
        edge = session.put_anchor(slot_of("anchor", draft))
    else:
        logger.info("version %d continues from another state, nnz %d", draft.version, nnz)
        edge = session.put_delta(slot_of("delta", draft), diff)
    session.writer.commit(draft, edge)


def _difference(session: Session, head: Committed) -> Diff | None:
    """What tells the snapshot from the newest version; ``None`` when an anchor is cheaper."""
    chain, config = session.writer.chain, session.config
    try:
        fetched = fetch(chain, chain.plan(None, head), base=config.base)
        diff = dict(_compare(fetched, session.source, session.snapshot))
    except (BrokenChainError, ObjectNotFoundError, FormatError, ConfigError) as exc:
        logger.warning("version %d can not be rebuilt from the store: %s", head.version, exc)
        return None
    if head.state + session.snapshot.change(diff) != session.snapshot.state:
        logger.warning("version %d in the store is not what its manifest says", head.version)
        return None
    absolute = config.encoding != "step"
    sparse = sum(
        sparse_nbytes(w.spec, diff[w.spec.name], absolute=absolute)
        for w in session.source.weights
        if w.spec.name in diff
    )
    return diff if sparse < session.anchor_nbytes else None


def _compare(fetched: Fetched, source: Source, snapshot: Snapshot) -> Iterator[tuple[str, Changes]]:
    """What tells the snapshot from the weights that a plan from nothing gives."""
    for weight in source.weights:
        delta = fetched.read(weight.spec.name)
        if not delta.is_dense:
            raise BrokenChainError(f"{weight.spec.name}: the chain does not give the whole tensor")
        changes = host.diff_(np.array(delta.values), snapshot.bits(weight))
        if changes.indices.size:
            yield weight.spec.name, changes
