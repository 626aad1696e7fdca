"""Finding out where an engine puts every checkpoint tensor, by running its own loader dry.

The engine's ``load_weights`` is given meta tensors under a dispatch mode that records each write
and lets none through. The source of a recorded copy is known by its storage: a view of a meta
tensor keeps offset and strides, so every record says which window of which checkpoint tensor lives
at which place. What a loader computes, copies, edits or loads in any other way is not guessed: such
a tensor gets no places but a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltachain.errors import TensorMismatchError
from deltachain.names import TORCH_DTYPES
from deltachain.subscribe.windows import Place
from deltachain.types import TensorSpec

Load: TypeAlias = Callable[[Iterable[tuple[str, Tensor]]], object]
"""An engine's own loader of ``(checkpoint name, full tensor)`` pairs."""

PADDING: Final = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""Writes of a constant: vocabulary padding, which no checkpoint tensor is the source of."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What one dry run showed.

    Attributes:
        places: Of each tensor that lives in the model bit by bit; empty when this rank has none.
        reasons: Of each tensor that does not, in words.
        raised: Those of them that the loader would not take at all.
    """

    places: Mapping[str, tuple[Place, ...]]
    reasons: Mapping[str, str]
    raised: frozenset[str]


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, buffer and plain tensor attribute that has elements, by dotted name."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        own = {**module._parameters, **module._buffers}  # has no public equal
        own.update((k, v) for k, v in vars(module).items() if isinstance(v, Tensor))
        for name, tensor in own.items():
            if tensor is not None and not tensor.is_meta and tensor.numel():
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def record(
    load: Load, specs: Iterable[TensorSpec], live: Callable[[], Mapping[str, Tensor]]
) -> Recording:
    """Run a loader dry, and say where it puts each tensor. No live byte is written.

    Args:
        load: The engine's loader; called once, and once a tensor if something could not be
            attributed. Nothing else may use the model meanwhile.
        specs: The tensors of the checkpoint.
        live: The live tensors, asked before and after.

    Raises:
        TensorMismatchError: The loader replaced live tensors: the model must be loaded again.
    """
    wanted = {spec.name: spec for spec in specs}
    before = _identity(live())
    storages = {_storage(tensor) for tensor in live().values()}
    runs = [_Run(wanted.values(), storages).execute(load)]
    if runs[0].unattributed:
        runs = [_Run([spec], storages).execute(load) for spec in wanted.values()]
    if _identity(live()) != before:
        raise TensorMismatchError(
            "the engine's loader replaced live tensors during a dry run",
            hint="this model can not be followed in place; restart the engine",
        )
    places: dict[str, list[Place]] = {name: [] for name in wanted}
    reasons: dict[str, str] = {}
    raised: set[str] = set()
    for run in runs:
        reasons.update(run.reasons)
        raised |= run.raised
        for name, place in run.found:
            places[name].append(place)
    kept = {name: tuple(mine) for name, mine in places.items() if name not in reasons}
    return Recording(kept, reasons, frozenset(raised))


class _Run(TorchDispatchMode):
    """One call of the loader: what it copied where, and what else it tried to write."""

    def __init__(self, specs: Iterable[TensorSpec], live: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meta = {
            s.name: torch.empty(s.shape, dtype=TORCH_DTYPES[s.dtype], device="meta") for s in specs
        }
        self.owner = {_storage(tensor): name for name, tensor in self.meta.items()}
        self.live = live
        self.found: list[tuple[str, Place]] = []
        self.reasons: dict[str, str] = {}
        self.raised: set[str] = set()
        self.fills: list[Tensor] = []
        self.unattributed = ""

    def execute(self, load: Load) -> _Run:
        """Run the loader under this mode."""
        try:
            with torch.no_grad(), self:
                load(list(self.meta.items()))
        except Exception as exc:  # noqa: BLE001 - whatever a loader raises is its answer: it can not
            self._fail(None, f"the loader raised {type(exc).__name__}: {exc}"[:200])
            self.raised.update(self.reasons if len(self.meta) == 1 else ())
        for name, place in self.found:
            if any(_overlaps(fill, place.live) for fill in self.fills):
                self._fail(name, "its place is also filled with a constant")
        return self

    def _fail(self, name: str | None, why: str) -> None:
        if name is None and len(self.meta) == 1:
            name = next(iter(self.meta))
        if name is None:
            self.unattributed = self.unattributed or why
        else:
            self.reasons.setdefault(name, why)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's signature
        """Record a copy into a live tensor, refuse every other write, let the rest through."""
        del types
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self._copied(args[0], args[1])
            return args[0]
        if func._schema.is_mutable:
            written = _written(func, args, kwargs)
            if self._blocks(func, written):
                return written[0] if func._schema.returns else None
        return func(*args, **kwargs)

    def _copied(self, live: Tensor, source: Tensor) -> None:
        name = self.owner.get(_storage(source))
        if name is None:
            self._fail(None, "the loader copies or computes before it writes")
        elif _storage(live) not in self.live:
            self._fail(name, "the loader stages it in a temporary")
        elif live.shape != source.shape:
            self._fail(name, "the loader broadcasts it")
        else:
            try:
                self.found.append(
                    (name, Place(live, int(source.storage_offset()), source.stride()))
                )
            except ValueError as exc:
                self._fail(name, str(exc))

    def _blocks(self, func: Any, written: list[Tensor]) -> bool:  # noqa: ANN401
        """Whether a write goes to a live tensor, and so must not happen."""
        for tensor in written:
            if tensor.is_meta and _storage(tensor) in self.owner:
                self._fail(self.owner[_storage(tensor)], f"the loader edits its input: {func}")
        hit = [t for t in written if not t.is_meta and _storage(t) in self.live]
        if func in PADDING:
            self.fills += [t for t in hit if t.numel()]
        elif any(t.numel() for t in hit):
            self._fail(None, f"the loader writes by {func}")
        return bool(hit)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:  # noqa: ANN401
    """The tensors that an operation writes to, by its schema."""
    schema = func._schema.arguments
    bound = [*zip(schema, args, strict=False)]
    bound += [(arg, kwargs[arg.name]) for arg in schema if arg.name in kwargs]
    leaves = [
        leaf
        for arg, value in bound
        if arg.alias_info is not None and arg.alias_info.is_write
        for leaf in tree_leaves(value)
    ]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # also tells meta storages apart


def _identity(live: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in live.items()}


def _overlaps(one: Tensor, other: Tensor) -> bool:
    if _storage(one) != _storage(other):
        return False
    numel = one.untyped_storage().nbytes() // one.element_size()
    mask = torch.zeros(numel, dtype=torch.bool)
    mask.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(mask.as_strided(other.shape, other.stride(), other.storage_offset()).any())
