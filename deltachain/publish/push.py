"""Publication of a checkpoint from disk, for trainers that write safetensors checkpoints.

A push is a publisher of a single version, with which it also takes over the chain: its epoch is one
higher than the head's, so that an earlier publisher is fenced with an error, and no empty version
is needed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.identity import check_recipe, refuse_mirror
from deltachain.chain.trust import Trust
from deltachain.checkpoint import Checkpoint
from deltachain.errors import (
    ChainMismatchError,
    ObjectNotFoundError,
    PublisherFencedError,
    UnsupportedModelError,
)
from deltachain.format.documents import EdgeSummary, Table, parse
from deltachain.format.keys import CHAIN_KEY, TABLE_KEY
from deltachain.kernels import host
from deltachain.kernels.device_diff import Compared
from deltachain.kernels.reference import Changes
from deltachain.publish.config import PublishConfig
from deltachain.publish.model.described import refuse_other_folder
from deltachain.publish.model.kept_files import check_files
from deltachain.publish.model.refusals import refuse_specs
from deltachain.publish.model.source import ModelTensors, Pending, Weight
from deltachain.publish.quantise.checkpoint_config import (
    Files,
    check_config,
    find_layers,
    quantised,
)
from deltachain.publish.quantise.settings import Quantization
from deltachain.publish.ranks.channel import Ranks
from deltachain.publish.resume import catch_up, first_version
from deltachain.publish.revert import check_reverted
from deltachain.publish.session import Session
from deltachain.publish.snapshot import Snapshot
from deltachain.publish.snapshot_memory import Kept
from deltachain.publish.tenure import Tenure
from deltachain.publish.writer import Writer, newest, open_or_make
from deltachain.store import Store
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import Bits, TensorSpec, mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """Result of a push.

    Attributes:
        chain: The chain.
        head: The newest version after the push.
        committed: The added versions; none if the head already had these bits.
        anchor: The added anchor, if one was due.
    """

    chain: Chain
    head: Committed
    committed: tuple[Committed, ...]
    anchor: EdgeSummary | None


_Base: TypeAlias = tuple[ModelTensors, Snapshot]
"""A base checkpoint, and its bits."""


def push(store: Store, path: Path, config: PublishConfig, *, step: int | None = None) -> Pushed:
    """Make a checkpoint the newest version of a chain.

    The first push creates the chain: version 0 is an anchor, or a reference to ``config.base``; in
    that case, the difference of the checkpoint from the base becomes version 1.

    Args:
        store: Store of the chain.
        path: Checkpoint folder, or one safetensors file.
        config: Settings of the publisher.
        step: Step of the trainer.

    Raises:
        ChainMismatchError: The chain is of another model.
        BrokenChainError: Versions are behind a gap, or the chain's identity is lost.
        ChainError: The head was reverted, and the checkpoint has other weights.
        PublisherFencedError: Another publisher is at work, or committed at the same time.
    """
    checkpoint, trust = Checkpoint(path), Trust.of_writer(config.signing_key)
    _refuse_unnamed(checkpoint)
    found = _find(store, checkpoint, config, trust)
    source = found.source
    source.agree("push")
    snapshot = Snapshot(source)  # all weights are checked before anything is written
    first, chain = None, found.chain
    if not isinstance(chain, Chain):
        first, chain = _of_base(config, source), chain()
    head = newest(chain)
    writer = Writer(chain, numel=source.numel, metadata=config.metadata, parent=head)
    session = Session(source, snapshot, writer, config, Ranks.alone())
    if head is not None:
        check_reverted(head, session.snapshot.state, goes_on=config.continue_reverted)
        writer.epoch = head.manifest.epoch + 1
    with Tenure(store, take_over=config.take_over) as tenure:
        if head is None or head.state != session.snapshot.state:
            tenure.begin()
            writer.tenure = tenure
        committed = tuple(_commit(session, first, step))
    last = writer.parent or head
    if last is None:
        raise ObjectNotFoundError(f"{store.url} lost its first version", url=store.url)
    return Pushed(
        chain=chain,
        head=last,
        committed=committed,
        anchor=session.add_anchor(topic="") if committed and session.anchor_due else None,
    )


def _refuse_unnamed(checkpoint: Checkpoint) -> None:
    if checkpoint.unnamed:
        raise UnsupportedModelError(
            f"{checkpoint.path}: its shards hold {checkpoint.unnamed[0]!r}, which is not in "
            f"{checkpoint.index}",
            hint="the index or the shards are of another save: save the checkpoint again",
        )


def _commit(session: Session, base: _Base | None, step: int | None) -> Iterator[Committed]:
    """Commit the difference of the checkpoint from the head."""
    writer = session.writer
    try:
        if writer.parent is None:
            at = step if session.config.base is None else None
            base = base or _of_base(session.config, session.source)
            first = session if base is None else _session_of(base, session)
            first_version(first, step=at)
            session.head = first.head
            yield _newest(writer)
        if _newest(writer).state != session.snapshot.state:
            catch_up(session, _newest(writer), step=step)
            yield _newest(writer)
    except PublisherFencedError as exc:
        exc.hint = "another publisher is at work here; if that is intended, push again"
        raise


def _of_base(config: PublishConfig, source: ModelTensors) -> _Base | None:
    """Return the base checkpoint, with which version 0 is committed; ``None`` without one."""
    if config.base is None:
        return None
    found = source_of(Checkpoint(config.base), source.table())
    return found, Snapshot(found)


def _session_of(base: _Base, session: Session) -> Session:
    return Session(*base, session.writer, session.config, session.ranks)


def _newest(writer: Writer) -> Committed:
    if writer.parent is None:
        raise AssertionError("a commit that did not raise moves the writer on")
    return writer.parent


@dataclass(frozen=True, slots=True)
class _Found:
    """The tensors of a checkpoint, and their chain.

    Attributes:
        source: The tensors to publish.
        chain: The existing chain, or a function that creates it or restores its identity.
    """

    source: ModelTensors
    chain: Chain | Callable[[], Chain]


def _find(store: Store, checkpoint: Checkpoint, config: PublishConfig, trust: Trust) -> _Found:
    """Find the chain of a checkpoint; write nothing, unless a chain lost its identity."""
    refuse_mirror(store, trust)
    assets = cache(partial(checkpoint.assets, trusted=config.trust_remote_code))
    quantization = Quantization.chosen(config.quantization)
    if quantization is not None:
        return _find_quantised(store, checkpoint, assets, quantization, trust)
    try:
        chain = Chain.open(store, trust)
    except ObjectNotFoundError:
        table = _table(store, checkpoint)
        check_recipe(store.url, table, {})
        refuse_other_folder(assets(), checkpoint.specs)
        create = partial(open_or_make, store, table, assets, trust=trust, by_state=False)
        return _Found(source_of(checkpoint, table), create)
    check_recipe(store.url, chain.table, {})
    check_config(chain, assets)
    check_files(chain, assets())
    return _Found(source_of(checkpoint, chain.table), chain)


def _find_quantised(
    store: Store, checkpoint: Checkpoint, assets: Files, quantization: Quantization, trust: Trust
) -> _Found:
    """Find the chain of a checkpoint that is quantised first."""
    plain = source_of(checkpoint, _own_table(checkpoint))
    if store.find(CHAIN_KEY) is None:
        refuse_other_folder(assets(), checkpoint.specs)
    made = quantised(plain, lambda: find_layers(None, plain, assets), quantization, Ranks.alone())

    def create() -> Chain:
        table, files = made.source.table(), partial(made.assets, assets())
        return open_or_make(store, table, files, trust=trust, by_state=False)

    return _Found(made.source, create() if store.find(CHAIN_KEY) is not None else create)


def _table(store: Store, checkpoint: Checkpoint) -> Table:
    """Return the table of a chain without identity, else that of the checkpoint's tensors."""
    try:
        there = parse(store.get(TABLE_KEY), Table, key=TABLE_KEY)
        source_of(checkpoint, there)
    except (ObjectNotFoundError, ChainMismatchError):
        return _own_table(checkpoint)
    return there


def _own_table(checkpoint: Checkpoint) -> Table:
    refuse_specs(checkpoint.specs.values())
    rows = tuple((s.name, s.dtype, s.shape) for s in checkpoint.specs.values())
    return Table(tensors=rows)


def source_of(checkpoint: Checkpoint, table: Table) -> ModelTensors:
    """Return the weights of a checkpoint, as input of a publisher.

    They count as frozen, since files that change during a push are refused, so no copy is kept.

    Raises:
        ChainMismatchError: The checkpoint's tensors differ from the table.
    """
    spare = {alias for alias in table.aliases if alias in checkpoint.specs}
    weights = []
    for spec in table.specs():
        tied = [alias for alias, name in table.aliases.items() if name == spec.name]
        found = [name for name in (spec.name, *tied) if name in checkpoint.specs]
        for name in found or [spec.name]:
            _check_spec(checkpoint, name, spec)
        for name in found[1:]:
            _check_tied(checkpoint, found[0], name)
        absent = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
        weight = Weight.straight(spec, absent, frozen=True)
        weights.append(replace(weight, pending=_FileTensor(checkpoint, found[0], spec)))
    extra = checkpoint.specs.keys() - spare - {weight.spec.name for weight in weights}
    if extra:
        raise ChainMismatchError(f"{checkpoint.path} has {min(extra)!r}, which the chain has not")
    return ModelTensors(tuple(weights), table.specs(), table.aliases, partial(_made, weights))


def _check_spec(checkpoint: Checkpoint, name: str, spec: TensorSpec) -> None:
    have = checkpoint.specs.get(name)
    if message := mismatch(name, have, checkpoint.path, spec, "the chain"):
        raise ChainMismatchError(message)


def _check_tied(checkpoint: Checkpoint, name: str, alias: str) -> None:
    if not np.array_equal(checkpoint.bits(name), checkpoint.bits(alias)):
        raise ChainMismatchError(
            f"{alias!r} and {name!r} differ in {checkpoint.path}; the chain has them tied"
        )


@dataclass(frozen=True, slots=True)
class _FileTensor(Pending):
    """A tensor of a checkpoint, read from its file whenever its bits are needed."""

    checkpoint: Checkpoint
    name: str
    spec: TensorSpec

    @property
    @override
    def device(self) -> torch.device:
        return torch.device("cpu")

    @override
    def to(self, device: torch.device) -> Pending:
        raise AssertionError("weights of a file are compared on the host")

    @override
    def make(self) -> Tensor:
        bits = self.checkpoint.bits(self.name)
        if bits.itemsize > 1:
            bits = bits.view(f"<i{bits.itemsize}")
        return torch.from_numpy(bits).view(TORCH_DTYPES[self.spec.dtype]).view(self.spec.shape)

    @override
    def diff_(self, snapshot: Bits) -> Changes:
        return host.diff_(snapshot, self.checkpoint.bits(self.name))

    @override
    def compared(self, name: str, kept: Kept) -> Compared:
        raise AssertionError("weights of a file are compared on the host")


def _made(weights: Iterable[Weight]) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of a checkpoint, one at a time."""
    for weight in weights:
        if weight.pending is not None:
            yield weight.spec.name, weight.pending.make()
