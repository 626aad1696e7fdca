"""Ways in which the loaders of engines write one checkpoint tensor into one region of a parameter.

Each takes the region, which can be found anew after its parameter was replaced, and what is to be
written, in the shape of the region.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Region:
    """Some elements of a parameter of a layer."""

    layer: nn.Module
    key: str
    cut: Callable[[Tensor], Tensor]

    @property
    def parameter(self) -> Any:
        return getattr(self.layer, self.key)

    @property
    def live(self) -> Tensor:
        return self.cut(self.parameter.data)


Writer: TypeAlias = Callable[[Region, Tensor], object]


def halves(region: Region, w: Tensor) -> None:
    half = len(w) // 2
    region.live.narrow(0, 0, half).copy_(w.narrow(0, 0, half))
    region.live.narrow(0, half, len(w) - half).copy_(w.narrow(0, half, len(w) - half))


def strided(region: Region, w: Tensor) -> None:
    region.live[0::2].copy_(w[0::2])
    region.live[1::2].copy_(w[1::2])


def chunks(region: Region, w: Tensor) -> None:
    for live, source in zip(region.live.unbind(-1), w.unbind(-1), strict=True):
        live.copy_(source)


PURE: Final[dict[str, Writer]] = {
    "copy": lambda r, w: r.live.copy_(w),
    "assign": lambda r, w: r.live.__setitem__(..., w),
    "copy to the parameter": lambda r, w: r.cut(r.parameter).copy_(w),
    "halves": halves,
    "strided": strided,
    "columns": chunks,
    "turned twice": lambda r, w: r.live.copy_(w.transpose(0, -1).transpose(0, -1)),
    "reshaped": lambda r, w: r.live.copy_(w.reshape(-1).view(w.shape)),
    "contiguous": lambda r, w: r.live.copy_(w.contiguous()),
}
"""What a place can be recorded of."""


def through_temporary(region: Region, w: Tensor) -> None:
    region.live.copy_(torch.empty(w.shape, dtype=w.dtype).copy_(w))


def fill_first(region: Region, w: Tensor) -> None:
    region.live.fill_(0)
    region.live.copy_(w)


def double(region: Region, w: Tensor) -> None:
    region.live.copy_(w)
    region.live.mul_(2)


def unless_nan(region: Region, w: Tensor) -> None:
    if not bool(w.float().isnan().any()):
        region.live.copy_(w)


def first_row(region: Region, w: Tensor) -> None:
    region.live.copy_(w[:1].expand(region.live.shape))


def last_write_wins(region: Region, w: Tensor) -> None:
    region.live.copy_(w.flip(0))
    region.live.copy_(w)


def then_zero_a_row(region: Region, w: Tensor) -> None:
    region.live.copy_(w)
    region.live[-1:].zero_()


COMPUTED: Final[dict[str, Writer]] = {
    "clone": lambda r, w: r.live.copy_(w.clone()),
    "temporary": through_temporary,
    "rolled": lambda r, w: r.live.copy_(torch.cat([w[1:], w[:1]])),
    "exponential": lambda r, w: r.live.copy_(-torch.exp(w.float())),
    "one more": lambda r, w: r.live.copy_(w + 1),
    "edited": lambda r, w: r.live.copy_(w.add_(1)),
    "negated in place": lambda r, w: r.live.copy_(w.neg_()),
    "cast": lambda r, w: r.live.copy_(w.float()),
    "indexed": lambda r, w: r.live.__setitem__(torch.arange(len(w)).flip(0), w.to(r.live.dtype)),
    "index_copy": lambda r, w: r.live.index_copy_(0, torch.arange(len(w)), w.to(r.live.dtype)),
    "foreach": lambda r, w: torch._foreach_copy_([r.live], [w]),
    "out": lambda r, w: torch.add(w.to(r.live.dtype), 0, out=r.live),
    "filled first": fill_first,
    "doubled": double,
    "last wins": last_write_wins,
    "unless NaN": unless_nan,
    "first row": first_row,
    "row zeroed": then_zero_a_row,
}
"""What must be loaded by the loader itself, and can be as often as one likes."""


def _new_parameter(region: Region, w: Tensor) -> None:
    made = region.parameter.data.clone()
    region.cut(made).copy_(w)
    setattr(region.layer, region.key, nn.Parameter(made, requires_grad=False))


def _new_data(region: Region, w: Tensor) -> None:
    made = region.parameter.data.clone()
    region.cut(made).copy_(w)
    region.parameter.data = made


REPLACING: Final[dict[str, Writer]] = {"new parameter": _new_parameter, "new data": _new_data}
"""What puts another tensor where the old one was."""


def _maximum(region: Region, w: Tensor) -> None:
    region.live.copy_(torch.maximum(region.live.float(), w.float()))


def _once(region: Region, w: Tensor) -> None:
    if not getattr(region.layer, "loader_done", False):
        region.live.copy_(w)
    if not w.is_meta:
        vars(region.layer)["loader_done"] = True


def _never_again(region: Region, w: Tensor) -> None:
    if getattr(region.layer, "loader_done", False):
        raise RuntimeError("this layer has been loaded")
    region.live.copy_(w)
    if not w.is_meta:
        vars(region.layer)["loader_done"] = True


def _turn_by_turn(region: Region, w: Tensor) -> None:
    odd = getattr(region.layer, "loader_odd", False)
    region.live.copy_(w.flip(0) if odd else w)
    if not w.is_meta:
        vars(region.layer)["loader_odd"] = not odd


STATEFUL: Final[dict[str, Writer]] = {
    "added": lambda r, w: r.live.add_(w.to(r.live.dtype)),
    "maximum": _maximum,
    "once": _once,
    "never again": _never_again,
    "turn by turn": _turn_by_turn,
}
"""What loads right into a raw parameter only."""

WRITERS: Final[dict[str, Writer]] = PURE | COMPUTED | REPLACING | STATEFUL

BLIND: Final = frozenset({"unless NaN"})
"""What cannot be run on tensors without bits."""
