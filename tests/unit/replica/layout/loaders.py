"""Ways in which engines load a tensor, and an engine of one layer that loads in any of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from deltachain.errors import EngineVersionError
from deltachain.replica.layout.load_recorder import live_tensors
from deltachain.replica.layout.loaded_checkpoint import layers_of
from deltachain.replica.layout.module_members import MemoryIndex
from tests.support.engine import UnmovedExperts

SIZE = (4, 6)


class OneLayer(UnmovedExperts, nn.Module):
    """A parameter and a buffer, both of which checkpoint tensors may be loaded into.

    Implements :class:`deltachain.replica.engine.EngineModel` as far as nothing is packed.
    """

    b: Tensor
    loader: "Callable[[OneLayer, Tensor], object]"

    def __init__(self, load: "Loader", dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.full(SIZE, 7, dtype=dtype), requires_grad=False)
        self.register_buffer("b", torch.full(SIZE, 7, dtype=dtype))
        # Not an attribute of its own: a function may hold weights where they cannot be found.
        self.__class__ = type("OneLayer", (type(self),), {"loader": staticmethod(load)})
        self.reloader: Loader | None = None
        self.checkpoint = Path()
        self.packs = False
        self.kernel: Callable[[], Tensor] | None = None
        self.plain = False
        self.rearranged: frozenset[str] = frozenset()
        self.repacks = False

    def modules(self) -> Mapping[str, nn.Module]:  # type: ignore[override]
        return dict(self.named_modules())

    def pack(self) -> None:
        """From now on, compute from a copy that nobody can see."""
        self.packs, packed = True, self.p.detach().clone()
        self.kernel = lambda: packed

    def tensors(self) -> Mapping[str, Tensor]:
        return live_tensors(self)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in tensors:
            self.loader(self, tensor)

    def reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in tensors:
            (self.reloader or self.loader)(self, tensor)
        if self.packs:
            self.pack()

    def repack(self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]) -> None:
        del layers
        if not self.repacks:
            raise EngineVersionError("this engine gives no way to do that")
        self.load(tensors)

    def layers(self, names: Mapping[str, Tensor]) -> Mapping[str, frozenset[str]]:
        return layers_of(
            self.load, names, MemoryIndex(("", t) for t in self.tensors().values()).overlapping
        )

    def processed(self) -> frozenset[str]:
        return self.rearranged | ({""} if self.packs else set())

    def made_by_running(self) -> frozenset[str]:
        return frozenset()

    def is_plain(self, layer: str) -> bool:
        del layer
        return self.plain

    @contextmanager
    def loaded_apart(
        self, layers: frozenset[str], tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[Mapping[str, nn.Module]]:
        del layers, tensors
        yield {}

    def probe(self, layer: nn.Module, seed: int) -> Tensor | None:
        del layer, seed
        return None

    def compute(self, layers: frozenset[str]) -> Mapping[str, Tensor]:
        return {"": self.kernel()} if self.kernel and "" in layers else {}


Loader: TypeAlias = Callable[[OneLayer, Tensor], object]


def slices(m: OneLayer, w: Tensor) -> None:
    m.p[0:2] = w[0:2]
    m.p[2:4] = w[2:4]


def halves(m: OneLayer, w: Tensor) -> None:
    m.p.data.narrow(0, 0, 2).copy_(w.narrow(0, 0, 2))
    m.p.data.narrow(0, 2, 2).copy_(w.narrow(0, 2, 2))


def padded(m: OneLayer, w: Tensor) -> None:
    m.p.data[:3].copy_(w[:3])
    m.p.data[3:].fill_(0)


def chunks(m: OneLayer, w: Tensor) -> None:
    for live, source in zip(m.p.data.chunk(2, 1), w.chunk(2, 1), strict=True):
        live.copy_(source)


PLANNED: dict[str, Loader] = {
    "copy": lambda m, w: m.p.data.copy_(w),
    "copy into a parameter": lambda m, w: m.p.copy_(w),
    "buffer": lambda m, w: m.b.copy_(w),
    "assign": lambda m, w: m.p.data.__setitem__(..., w),
    "slices": slices,
    "halves": halves,
    "chunks": chunks,
    "turned and back": lambda m, w: m.p.data.copy_(w.t().t()),
    "reshaped": lambda m, w: m.p.data.view(-1).copy_(w.view(-1)),
    "contiguous": lambda m, w: m.p.data.copy_(w.contiguous()),
    "padded": padded,
}
"""What leads to a place of every element, or of those that are loaded."""


def copy_and_double(m: OneLayer, w: Tensor) -> None:
    m.p.data.copy_(w)
    m.p.data.mul_(2)


def through_a_temporary(m: OneLayer, w: Tensor) -> None:
    m.p.data.copy_(torch.empty(SIZE, dtype=w.dtype).copy_(w))


def fill_first(m: OneLayer, w: Tensor) -> None:
    m.p.data.fill_(0)
    m.p.data.copy_(w)


def set_data(m: OneLayer, w: Tensor) -> None:
    m.p.data = w.to("cpu")


def unless_nan(m: OneLayer, w: Tensor) -> None:
    if not bool(w.isnan().any()):
        m.p.data.copy_(w)


REFUSED: dict[str, tuple[Loader, str]] = {
    "index": (lambda m, w: m.p.__setitem__(torch.tensor([1, 0, 3, 2]), w), "index_put_"),
    "fill by a tensor": (lambda m, w: m.p.data.fill_(w[0, 0]), "fill_.Tensor"),
    "edit": (lambda m, w: m.p.data.copy_(w.add_(1)), "edits its input"),
    "zero": (lambda m, w: m.p.data.copy_(w.zero_()), "edits its input"),
    "copy and double": (copy_and_double, "writes by aten.mul_"),
    "clone": (lambda m, w: m.p.data.copy_(w.clone()), "copies or computes"),
    "compute": (lambda m, w: m.p.data.copy_(-torch.exp(w)), "copies or computes"),
    "cast and copy": (lambda m, w: m.p.data.copy_(w.float()), "copies or computes"),
    "concatenate": (lambda m, w: m.p.data.copy_(torch.cat([w[2:], w[:2]])), "copies or computes"),
    "temporary": (through_a_temporary, "temporary"),
    "broadcast": (lambda m, w: m.p.data.copy_(w[0]), "broadcasts"),
    "expand": (lambda m, w: m.p.data.copy_(w[0].expand(SIZE)), "overlaps itself"),
    "fill first": (fill_first, "filled with a constant"),
    "out": (lambda m, w: torch.add(w, 0, out=m.p.data), "."),
    "index_copy_": (lambda m, w: m.p.data.index_copy_(0, torch.arange(4), w), "."),
    "foreach": (lambda m, w: torch._foreach_copy_([m.p.data], [w]), "."),
    "add": (lambda m, w: m.p.data.add_(w), "writes by aten.add_"),
    "item": (lambda m, w: m.p.data.fill_(w[0, 0].item()), "raised"),
    "look": (unless_nan, "raised"),
    "set data": (set_data, "raised"),
    "raise": (lambda m, w: m.p.data.copy_(w[5]), "raised IndexError"),
}
"""What leads to no place, and the word to expect in the reason."""
