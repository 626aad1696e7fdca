"""Start or continuation of a chain when a publisher attaches to a model."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

import msgspec
import numpy as np

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.fetch import Fetched, fetch
from deltachain.chain.trust import Trust
from deltachain.checkpoint import ADAPTER_FILE, weights_file
from deltachain.errors import (
    BrokenChainError,
    ConfigError,
    FormatError,
    ObjectNotFoundError,
    PublisherFencedError,
)
from deltachain.format.keys import CHAIN_KEY
from deltachain.kernels import host
from deltachain.kernels.reference import Changes
from deltachain.publish.config import PublishConfig
from deltachain.publish.model.assets import refuse_other_folder
from deltachain.publish.model.kept_files import CONFIG_FILE, with_dtype_of
from deltachain.publish.model.refusals import refuse_specs
from deltachain.publish.model.source import ModelTensors
from deltachain.publish.quantise.checkpoint_config import Files, quantised
from deltachain.publish.quantise.layers import Layers
from deltachain.publish.quantise.settings import Quantization
from deltachain.publish.ranks.collectives import Collective, Ranks
from deltachain.publish.ranks.sharing import divide
from deltachain.publish.revert import check_reverted
from deltachain.publish.session import Attempt, Session
from deltachain.publish.snapshot import WINDOW_NUMEL, Snapshot
from deltachain.publish.tenure import Tenure
from deltachain.publish.wire_form import Diff, map_changes
from deltachain.publish.writer import Writer, open_or_make, take_over
from deltachain.store import Store
from deltachain.types import Bits, StateDigest

logger = logging.getLogger(__name__)

_SAME_STORE: Final = (
    "every rank must reach the same store: share a folder between hosts, or use a bucket"
)


class Position(msgspec.Struct, frozen=True):
    """Start of rank 0.

    Attributes:
        chain: Id of the chain.
        epoch: Its epoch.
        head: The newest version; -1 for none.
        trusted: Public keys that it trusts, with commas between them; empty if it trusts all.
    """

    chain: str
    epoch: int
    head: int
    trusted: str

    @classmethod
    def of(cls, writer: Writer) -> Position:
        head, trusted = writer.parent, writer.chain.trust.trusted
        return cls(
            chain=writer.chain.identity.chain,
            epoch=writer.epoch,
            head=head.version if head else -1,
            trusted=str(trusted) if trusted else "",
        )


def begin(
    store: Store,
    collect: Callable[[], ModelTensors],
    config: PublishConfig,
    assets: Files,
    ranks: Ranks,
    layers: Callable[[ModelTensors, Files], Layers],
) -> Session:
    """Create the chain or take it over; its newest version then equals the current model.

    Args:
        store: Store of the chain.
        collect: Function that collects the weights on this rank.
        config: Settings of the publisher.
        assets: Function that collects small files for the chain; called on rank 0.
        ranks: All publishing ranks.
        layers: Function that finds the layers of this rank's weights, if they are quantised.

    Raises:
        ChainMismatchError: The URL has the chain of another model.
        BrokenChainError: Versions are behind a gap, or the chain's identity is lost.
        ChainError: The head was reverted, and the model has other weights.
        PublisherFencedError: Another publisher is at work, or was first.
        ConfigError: The model cannot be published here.
    """
    with ExitStack() as undone:
        tenure = Tenure(store, take_over=config.take_over)
        undone.callback(tenure.close)
        source = divide(collect, ranks)
        described: Files = partial(_described, store, source, assets)
        files = described
        if (quantization := Quantization.chosen(config.quantization)) is not None:
            made = quantised(source, lambda: layers(source, assets), quantization, ranks)
            source, files = made.source, lambda: made.assets(described())
        refuse_specs(source.specs)  # those of all ranks: every rank refuses
        source.agree("begin")
        with Collective(ranks, "begin") as collective:
            snapshot = Snapshot(source, where=config.snapshot)
            states = collective.gather(snapshot.state, StateDigest)  # every rank is ready
            state = sum(states, StateDigest())
            writer = _take_chain(tenure, source, config, files, state) if ranks.leads else None
            position = collective.broadcast(Position.of(writer) if writer else None, Position)
        with Collective(ranks, "open") as collective:
            writer = writer or _open_chain(store, source, config, position, ranks.number)
            collective.all_gather(True, bool)
        session = Session(source, snapshot, writer, config, ranks)
        if writer.parent is None:
            first_version(session)
        else:
            catch_up(session, writer.parent)
        undone.pop_all()
        return session


def _described(store: Store, source: ModelTensors, assets: Files) -> Mapping[str, bytes]:
    """Return the files of a chain. Files of a new chain must describe the tensors of an export.

    Modules are compared with their own configuration. Of an adapter it may be the base's.
    """
    files = assets()
    if not source.one_by_one or CONFIG_FILE not in files:
        return files
    specs = {spec.name: spec for spec in source.specs}
    if weights_file(specs, files) != ADAPTER_FILE and store.find(CHAIN_KEY) is None:
        refuse_other_folder(files, specs)
    return files


def _take_chain(
    tenure: Tenure,
    source: ModelTensors,
    config: PublishConfig,
    assets: Files,
    state: StateDigest,
) -> Writer:
    chain = open_or_make(
        tenure.store,
        source.table(),
        lambda: with_dtype_of(assets(), source.specs),
        trust=Trust.of_writer(config.signing_key),
        base=config.base,
    )
    tenure.begin()
    _say_where(chain)
    accept = partial(check_reverted, state=state, goes_on=config.continue_reverted)
    try:
        writer = take_over(chain, numel=source.numel, metadata=config.metadata, accept=accept)
    except PublisherFencedError as error:
        tenure.name(error)
        raise
    writer = writer or Writer(chain, numel=source.numel, metadata=config.metadata, parent=None)
    writer.tenure, tenure.look = tenure, writer.why_stopped
    return writer


def _say_where(chain: Chain) -> None:
    """Log where weights go; tell it on stderr where such lines of the log are not shown.

    A mistyped URL may be a folder, to which a whole run is published.
    """
    if logger.isEnabledFor(logging.INFO):
        logger.info("publishing to %s", chain.store.url)
    else:
        sys.stderr.write(f"deltachain: publishing to {chain.store.url}\n")


def _open_chain(
    store: Store, source: ModelTensors, config: PublishConfig, position: Position, rank: int
) -> Writer:
    """Open the chain on a rank other than 0, which uploads parts without commits.

    Only rank 0 needs the signing key; the others trust what it trusts.
    """
    try:
        chain = Chain.open(store, Trust.of_reader(position.trusted, environment={}))
        if chain.identity.chain != position.chain:
            raise ConfigError(
                f"{store.url} has chain {chain.identity.chain} on rank {rank}, "
                f"chain {position.chain} on rank 0",
                hint=_SAME_STORE,
            )
        parent = chain.read(position.head) if position.head >= 0 else None
    except ObjectNotFoundError as exc:
        exc.hint = _SAME_STORE
        raise
    writer = Writer(chain, numel=source.numel, metadata=config.metadata, parent=parent)
    writer.epoch = position.epoch
    return writer


def first_version(session: Session, *, step: int | None = None) -> None:
    """Commit version 0: an anchor, or a reference to a base checkpoint."""
    session.commit(Attempt(topic="first", base=session.config.base, step=step))


class RankDifference(msgspec.Struct, frozen=True):
    """Difference of one rank's weights from those of the newest version.

    Attributes:
        state: Contribution of the rank's weights to the state digest.
        change: Change of the state digest by the difference; ``None`` if the chain is unreadable.
        nbytes: Approximate size of the difference as a delta, in bytes.
    """

    state: StateDigest
    change: StateDigest | None = None
    nbytes: int = 0


def catch_up(session: Session, head: Committed, *, step: int | None = None) -> None:
    """Publish the difference of the snapshot from the newest version, if any.

    It becomes a delta, or an anchor if that is smaller or the newest version is unreadable.
    """
    with Collective(session.ranks, "states") as collective:
        states = collective.all_gather(session.snapshot.state, StateDigest)
    if sum(states, StateDigest()) == head.state:
        return
    with Collective(session.ranks, "difference") as collective:
        diff = _difference(session, head)
        mine = RankDifference(session.snapshot.state)
        if diff is not None:
            estimate = session.encoding.estimate
            nbytes = sum(estimate(one.spec, one.changes) for one in diff.by_tensor)
            mine = RankDifference(session.snapshot.state, diff.digest, nbytes)
        found = collective.all_gather(mine, RankDifference)
    nbytes = sum(one.nbytes for one in found)
    if diff is not None and _is_proven(found, head) and nbytes < session.anchor_nbytes:
        logger.info("version %d continues from another state", head.version + 1)
        session.commit(Attempt(topic="up", diff=diff, step=step))
        return
    logger.warning("version %d starts over with an anchor", head.version + 1)
    session.commit(Attempt(topic="up", step=step))


def _is_proven(found: Sequence[RankDifference], head: Committed) -> bool:
    """Return whether every rank read the newest version with the state in its manifest."""
    changes = [one.change for one in found if one.change is not None]
    if len(changes) < len(found):
        return False
    states = sum((one.state for one in found), StateDigest())
    if head.state + sum(changes, StateDigest()) != states:
        logger.warning("version %d in the store is not what its manifest says", head.version)
        return False
    return True


def _difference(session: Session, head: Committed) -> Diff | None:
    chain, config = session.writer.chain, session.config
    try:
        fetched = fetch(chain, chain.plan(None, head), base=config.base)
        changes = dict(_compare(fetched, session.source, session.snapshot))
    except (BrokenChainError, ObjectNotFoundError, FormatError, ConfigError) as exc:
        logger.warning("version %d cannot be rebuilt from the store: %s", head.version, exc)
        return None
    return map_changes(changes, session.source.weights)


def _compare(
    fetched: Fetched, source: ModelTensors, snapshot: Snapshot
) -> Iterator[tuple[str, Changes]]:
    """Yield changes from the weights of a plan from nothing to those of the snapshot."""
    for weight in source.weights:
        bits = snapshot.bits(weight)
        then = np.empty_like(bits)
        values, read = bits, ""
        for window in weight.element_map.windows(WINDOW_NUMEL):
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
