"""Publication of a checkpoint from disk, for trainers that write safetensors checkpoints.

A push is a publisher of a single version, with which it also takes over the chain: its epoch is one
higher than the head's, so that an earlier publisher is fenced with an error, and no empty version
is needed in between.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from deltachain import errors
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.identity import check_recipe, refuse_mirror
from deltachain.chain.trust import Trust
from deltachain.checkpoint import Checkpoint
from deltachain.format.documents import EdgeSummary, Table, parse
from deltachain.format.keys import CHAIN_KEY, TABLE_KEY
from deltachain.publish.config import PublishConfig
from deltachain.publish.model.assets import refuse_other_folder
from deltachain.publish.model.kept_files import check_files
from deltachain.publish.model.refusals import refuse_specs
from deltachain.publish.model.source import ModelTensors, Weight
from deltachain.publish.publisher_record import Tenure
from deltachain.publish.quantise.layers import Files, check_config, find_layers
from deltachain.publish.quantise.settings import Quantization
from deltachain.publish.quantise.tensors import quantised
from deltachain.publish.ranks.collectives import Ranks
from deltachain.publish.revert import check_reverted
from deltachain.publish.session import Session, catch_up, first_version
from deltachain.publish.snapshot import Snapshot
from deltachain.publish.writer import Writer, newest, open_or_make
from deltachain.store import Store
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import TensorSpec, mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    chain: Chain
    head: Committed
    committed: tuple[Committed, ...]
    anchor: EdgeSummary | None


def push(store: Store, path: Path, config: PublishConfig, *, step: int | None = None) -> Pushed:
    """Make a checkpoint the newest version of a chain.

    The first push creates the chain: version 0 is an anchor, or a reference to ``config.base``,
    from which the difference of the checkpoint becomes version 1.
    """
    checkpoint, trust = Checkpoint(path), Trust.of_writer(config.signing_key)
    if checkpoint.unnamed:
        raise errors.UnsupportedModelError(
            f"{checkpoint.path}: its shards hold {checkpoint.unnamed[0]!r}, which is not in "
            f"{checkpoint.index}",
            hint="the index or the shards are of another save: save the checkpoint again",
        )
    source, chain = _find(store, checkpoint, config, trust)
    source.agree("push")
    snapshot, first = Snapshot(source), None  # all is checked before anything is written
    if not isinstance(chain, Chain):
        first = _of_base(config, source)
        chain = chain()
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
    anchor = None
    if committed and session.anchor_due:
        anchor = session.add_anchor(session.begin_anchor(), topic="")
    return Pushed(chain=chain, head=_newest(writer), committed=committed, anchor=anchor)


def _commit(
    session: Session, base: tuple[ModelTensors, Snapshot] | None, step: int | None
) -> Iterator[Committed]:
    writer = session.writer
    try:
        if writer.parent is None:
            at = step if session.config.base is None else None
            base = base or _of_base(session.config, session.source)
            first = session
            if base is not None:
                first = Session(*base, writer, session.config, session.ranks)
            first_version(first, step=at)
            session.head = first.head
            yield _newest(writer)
        if _newest(writer).state != session.snapshot.state:
            catch_up(session, _newest(writer), step=step)
            yield _newest(writer)
    except errors.PublisherFencedError as exc:
        exc.hint = "another publisher is at work here; if that is intended, push again"
        raise


def _of_base(config: PublishConfig, source: ModelTensors) -> tuple[ModelTensors, Snapshot] | None:
    if config.base is None:
        return None
    found = source_of(Checkpoint(config.base), source.table())
    return found, Snapshot(found)


def _newest(writer: Writer) -> Committed:
    if writer.parent is None:
        raise AssertionError("a commit that did not raise moves the writer on")
    return writer.parent


def _find(
    store: Store, checkpoint: Checkpoint, config: PublishConfig, trust: Trust
) -> tuple[ModelTensors, Chain | Callable[[], Chain]]:
    """Find the tensors of a checkpoint and their chain, or a function that makes it.

    Nothing is written, unless a chain lost its identity.
    """
    refuse_mirror(store, trust)
    assets = cache(partial(checkpoint.assets, trusted=config.trust_remote_code))
    if (quantization := Quantization.chosen(config.quantization)) is not None:
        return _find_quantised(store, checkpoint, assets, quantization, trust)
    try:
        chain = Chain.open(store, trust)
    except errors.ObjectNotFoundError:
        table = _table(store, checkpoint)
        check_recipe(store.url, table, {})
        refuse_other_folder(assets(), checkpoint.specs)
        create = partial(open_or_make, store, table, assets, trust=trust, by_state=False)
        return source_of(checkpoint, table), create
    check_recipe(store.url, chain.table, {})
    check_config(chain, assets)
    check_files(chain, assets())
    return source_of(checkpoint, chain.table), chain


def _find_quantised(
    store: Store, checkpoint: Checkpoint, assets: Files, quantization: Quantization, trust: Trust
) -> tuple[ModelTensors, Chain | Callable[[], Chain]]:
    plain, is_new = source_of(checkpoint, _own_table(checkpoint)), store.find(CHAIN_KEY) is None
    if is_new:
        refuse_other_folder(assets(), checkpoint.specs)
    source, files = quantised(
        plain, lambda: find_layers(None, plain, assets), quantization, Ranks.alone(), assets
    )
    table = source.table()
    create = partial(open_or_make, store, table, files, trust=trust, by_state=False)
    return source, create if is_new else create()


def _table(store: Store, checkpoint: Checkpoint) -> Table:
    """Return the table of a chain without identity, else that of the checkpoint's tensors."""
    with suppress(errors.ObjectNotFoundError, errors.ChainMismatchError):
        there = parse(store.get(TABLE_KEY), Table, key=TABLE_KEY)
        source_of(checkpoint, there)
        return there
    return _own_table(checkpoint)


def _own_table(checkpoint: Checkpoint) -> Table:
    refuse_specs(checkpoint.specs.values())
    rows = tuple((s.name, s.dtype, s.shape) for s in checkpoint.specs.values())
    return Table(tensors=rows)


def source_of(checkpoint: Checkpoint, table: Table) -> ModelTensors:
    """Return the weights of a checkpoint. They count as frozen, so that no copy is kept."""
    weights = []
    for spec in table.specs():
        tied = [alias for alias, name in table.aliases.items() if name == spec.name]
        found = [name for name in (spec.name, *tied) if name in checkpoint.specs]
        for name in found or [spec.name]:
            have = checkpoint.specs.get(name)
            if message := mismatch(name, have, checkpoint.path, spec, "the chain"):
                raise errors.ChainMismatchError(message)
        for name in found[1:]:
            if checkpoint.differ(found[0], name):
                raise errors.ChainMismatchError(
                    f"{name!r} and {found[0]!r} differ in {checkpoint.path}; the chain has them "
                    "tied"
                )
        absent = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
        weight = Weight.straight(spec, absent, frozen=True)
        weights.append(replace(weight, file=partial(_read, checkpoint, found[0], spec)))
    known = {*table.aliases, *(spec.name for spec in table.specs())}
    for extra in sorted(checkpoint.specs.keys() - known):
        raise errors.ChainMismatchError(f"{checkpoint.path} has {extra!r}, which the chain has not")
    return ModelTensors(tuple(weights), table.specs(), table.aliases, partial(_made, weights))


def _read(checkpoint: Checkpoint, name: str, spec: TensorSpec, low: int, high: int) -> Tensor:
    return torch.from_numpy(checkpoint.bits(name, low, high)).view(TORCH_DTYPES[spec.dtype])


def _made(weights: Iterable[Weight]) -> Iterator[tuple[str, Tensor]]:
    for one in weights:
        if one.file is not None:
            yield one.spec.name, one.file(0, one.spec.numel).view(one.spec.shape)
