"""Record all members of an engine's modules, and restore them.

A loader may do more than write bits: it may register parameters, replace tensors and set
attributes. So may post-load processing, even on objects that are not modules, such as a layer's
quantisation method. All members are recorded by identity: dictionaries, lists and sets with their
items, and tensors with the memory that they view.
"""

# ruff: noqa: ANN401 - members of modules have any type
import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from hashlib import blake2b
from itertools import chain, combinations
from operator import is_
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from deltachain.errors import EngineDamagedError, TensorMismatchError
from deltachain.format.keys import DigestKey
from deltachain.kernels import host, torch_kernels
from deltachain.threads import Pool, cores
from deltachain.types import StateDigest

_A = TypeVar("_A")
_T = TypeVar("_T")

MOST: Final = 4  # threads that read, compare and restore bits: each needs the memory of a tensor

SMALL: Final = 1 << 20  # bytes up to which no thread is worth its start


class Provenance:
    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self._owner = {storage_id(tensor): name for name, tensor in inputs.items()}
        self._made: dict[int, frozenset[str]] = {}
        self._kept: list[Tensor] = []

    def owner(self, tensor: Tensor) -> str | None:
        return self._owner.get(storage_id(tensor))

    def sources(self, values: Any) -> frozenset[str]:
        """Return the checkpoint tensors that some values are, view, or were computed from."""
        found: frozenset[str] = frozenset()
        for tensor in tensors_among(values):
            storage = storage_id(tensor)
            found |= self._made.get(storage, frozenset())
            if storage in self._owner:
                found |= {self._owner[storage]}
        return found

    def made(self, values: Any, sources: frozenset[str]) -> None:
        for tensor in tensors_among(values) if sources else ():
            storage = storage_id(tensor)
            if storage not in self._owner:
                self._made[storage] = self._made.get(storage, frozenset()) | sources
                self._kept.append(tensor)  # otherwise another tensor might reuse its storage


def tensors_among(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results of an operation, and in containers of these."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from tensors_among(value)


def storage_id(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, which may be on the meta device."""
    return int(tensor.untyped_storage()._cdata)


class MemoryIndex:
    """An index of tensors by the memory that they view, meta tensors included, by owner."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, tensor in tensors:
            if tensor.numel():
                self._tensors[storage_id(tensor)].append((name, tensor))
        self._tied: dict[str, set[str]] = defaultdict(set)
        for sharing in self._tensors.values():
            for (name, tensor), (other, theirs) in combinations(sharing, 2):
                if other != name and overlap(tensor, theirs):
                    self._tied[name].add(other)
                    self._tied[other].add(name)

    def overlapping(self, tensor: Tensor) -> frozenset[str]:
        sharing = self._tensors.get(storage_id(tensor), ())
        return frozenset(name for name, other in sharing if overlap(tensor, other))

    def in_storage_of(self, tensor: Tensor) -> frozenset[str]:
        return frozenset(name for name, _ in self._tensors.get(storage_id(tensor), ()))

    def tied(self, names: frozenset[str]) -> frozenset[str]:
        """Return the given owners, and those whose tensors share an element with theirs."""
        return names.union(*(self._tied.get(name, ()) for name in names))


def overlap(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return bool(one.numel())
    (first, last), (start, end) = span(one), span(other)
    if first >= end or start >= last:
        return False
    width = one.element_size()
    if one.numel() * width == last - first and other.numel() * other.element_size() == end - start:
        return True
    if width != other.element_size():
        return True  # as far as is known: only flat buffers are viewed in two widths
    base = min(one.storage_offset(), other.storage_offset())
    taken = torch.zeros(max(last, end) // width - base, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset() - base).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset() - base).any())


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the offsets of a tensor's first byte in its storage and after its last."""
    width, first = tensor.element_size(), int(tensor.storage_offset())
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
    return first * width, (first + reach) * width


NESTED: Final = 3
"""Depth of nested objects that are followed from an object with post-load processing."""

ACTS: Final = "process_weights_after_loading"
"""Method that engines call on a module, or on an object of one, once its weights are loaded."""

SIMPLE: Final = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)
"""Types of values without weights."""

LEAVES: Final = frozenset(
    (*SIMPLE, type(None), Tensor, nn.Parameter, type, FunctionType, ModuleType)
)
"""Types of most members of modules: neither containers nor objects with attributes."""

CONFIGURATION: Final = "Config"
"""Suffix of the names of configuration classes, whose objects hold no weights."""


@dataclass(frozen=True, slots=True)
class _Memory:
    """A tensor, the memory that it views, and its own attributes."""

    tensor: Tensor
    view: Tensor
    attributes: dict[str, Any]

    def has_moved(self) -> bool:
        now = self.tensor.data
        return now.data_ptr() != self.view.data_ptr() or _form(now) != _form(self.view)

    def put_back(self) -> None:
        if self.has_moved():
            self.tensor.data = self.view
        _refill(vars(self.tensor), self.attributes)


class Members:
    """A record of the members of some modules.

    A submodule that is not given keeps its place, but its members are not recorded.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._boxes: dict[int, _Box] = {}
        self._memories: dict[int, _Memory] = {}
        self._roots = [self._record(module) for module in modules]

    def put_back(self) -> None:
        """Restore the members of the modules; bits are not recorded, and stay as they are."""
        for box in self._boxes.values():
            box.put_back()
        for memory in self._memories.values():
            memory.put_back()

    def release(self, modules: Iterable[nn.Module]) -> None:
        """Do not put back members of some modules that may hide weights, such as functions.

        To keep them would keep weights in memory that others replaced.
        """
        for container in chain.from_iterable(map(containers_of, modules)):
            box = self._boxes.get(id(container))
            if box is not None and isinstance(container, dict):
                hiding = [key for key, one in box.items.items() if may_hide_tensors(one)]
                box.items.update(dict.fromkeys(hiding, _STAYS))

    def have_changed(self) -> bool:
        return any(box.has_changed() for box in self._boxes.values()) or any(
            memory.has_moved() for memory in self._memories.values()
        )

    def replaced(self) -> Iterator[Any]:
        for box in self._boxes.values():
            for key, after in items(box.container).items():
                if after is not box.items.get(key):
                    yield after

    def settle(self) -> None:
        """Copy the bits of new tensors into those that they replaced, and put those back.

        Members without tensors, such as functions, stay as they are now.
        """
        seen: set[int] = set()
        for root in self._roots:
            self._settle(root, root.container, seen)

    def _record(self, module: nn.Module) -> "_Box":
        for container in containers_of(module):
            box = self._boxes[id(container)] = _Box(container, items(container))
            for value in box.items.values():
                if isinstance(value, Tensor):
                    memory = _Memory(value, value.data, dict(vars(value)))
                    self._memories.setdefault(id(value), memory)
        return self._boxes[id(vars(module))]

    def _settle(self, box: "_Box", now: Any, seen: set[int]) -> None:
        if id(box) in seen:
            return
        seen.add(id(box))
        if not box.items and not now:
            return
        found = items(now)
        for key, before in box.items.items():
            inner = self._boxes.get(id(container_of(before)))
            if isinstance(before, Tensor):
                self._settle_tensor(str(key), before, found.get(key))
            elif inner is None or isinstance(before, nn.Module):
                continue
            else:
                after = container_of(found.get(key))
                if after is not None:
                    self._settle(inner, after, seen)
            box.put(key, before)
        self._settle_new(box, found)

    def _settle_new(self, box: "_Box", found: dict[Any, Any]) -> None:
        for key, after in found.items():
            before, is_tensor = box.items.get(key), isinstance(after, Tensor)
            if is_tensor and key not in box.items and after.numel():
                raise TensorMismatchError(f"the engine made another tensor, {key!r}")
            known = isinstance(before, nn.Module | Tensor)
            if not (known or is_tensor or id(container_of(before)) in self._boxes):
                box.put(key, after)

    def _settle_tensor(self, key: str, before: Tensor, after: Any) -> None:
        memory = self._memories[id(before)]
        if not isinstance(after, Tensor):
            raise TensorMismatchError(f"the engine dropped its tensor {key!r}")
        now = after.data
        if (now.shape, now.dtype) != (memory.view.shape, memory.view.dtype):
            raise TensorMismatchError(
                f"the engine recreated {key!r} as {now.dtype}{tuple(now.shape)}, "
                f"it was {memory.view.dtype}{tuple(memory.view.shape)}"
            )
        if now.data_ptr() != memory.view.data_ptr() or now.stride() != memory.view.stride():
            memory.view.copy_(now)
        memory.put_back()


_STAYS: Final = object()  # what a record has in the place of a member that is not put back


class _Box:
    def __init__(self, container: Any, items: dict[Any, Any]) -> None:
        self.container = container
        self.items = items

    def put(self, key: Any, value: Any) -> None:
        container = self.container
        if isinstance(container, dict) or (isinstance(container, list) and key < len(container)):
            container[key] = value

    def has_changed(self) -> bool:
        return not _same(items(self.container), self.items)

    def put_back(self) -> None:
        if isinstance(self.container, dict):
            now, before = self.container, self.items.items()
            _refill(now, {k: now.get(k) if one is _STAYS else one for k, one in before})
        elif isinstance(self.container, list):
            self.container[:] = self.items.values()
        elif isinstance(self.container, set):
            self.container.clear()
            self.container.update(self.items.values())


class Fingerprints:
    """Digests of the bits of some tensors and of their storages; 128 bits by a secret key."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._storages = {flat.data_ptr(): flat for flat in map(storage_of, tensors.values())}
        views = {_view(one): one for one in (*self._storages.values(), *tensors.values())}
        digests = in_threads(fingerprint, views.values(), itself)
        self._digests = dict(zip(views, digests, strict=True))

    def has_changed(self, tensor: Tensor) -> bool:
        """Return whether a tensor's bits differ from the recorded ones, or were not recorded."""
        known = self._digests.get(_view(tensor))
        return bool(tensor.numel()) if known is None else known != fingerprint(tensor)


class SavedBits(Fingerprints):
    """Bits of some tensors, to be put back.

    Storages are copied to the host, except those with a function in ``again``, by address, that
    writes their bits again.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        again: Mapping[int, Callable[[], object]] = MappingProxyType({}),
    ) -> None:
        super().__init__(tensors)
        self._again = dict(again)
        for address, live in self._storages.items():
            if address not in again:
                self._again[address] = partial(_copy_back, live, live.to("cpu", copy=True))

    def put_back(self) -> None:
        """Restore the bits; raises an :class:`EngineDamagedError` if they cannot be had again."""
        list(in_threads(self._put_back, self._storages.values(), itself))

    def _put_back(self, live: Tensor) -> None:
        if not self.has_changed(live):
            return
        why = "the checkpoint on disk changed meanwhile"
        try:
            with torch.no_grad():
                self._again[live.data_ptr()]()
        except Exception as exc:  # noqa: BLE001 - whatever the reason, the engine must not serve
            why = repr(exc)
        if self.has_changed(live):
            raise EngineDamagedError(f"weights cannot be put back after test loads: {why}")


def in_threads(
    function: Callable[[_A], _T], items: Collection[_A], tensor: Callable[[_A], Tensor]
) -> Iterator[_T]:
    """Apply a function that reads or writes the tensors of items, in order.

    Large tensors on the host are handled by several threads.
    """
    is_here = all(torch_kernels.on_host(tensor(item)) for item in items)
    with Pool(min(cores(), MOST) if is_here else 0) as pool:
        yield from pool.ordered(
            function, items, ahead=2 * MOST, small=lambda item: tensor(item).nbytes < SMALL
        )


def itself(tensor: Tensor) -> Tensor:
    return tensor


def _view(tensor: Tensor) -> object:
    """Return what identifies the memory that a tensor views."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.nbytes
    return tensor.data_ptr(), tensor.element_size(), tensor.shape, tensor.stride()


def _copy_back(live: Tensor, saved: Tensor) -> None:
    live.copy_(saved)


_KEY: Final = secrets.randbits(64), secrets.randbits(64)


def fingerprint(tensor: Tensor, key: DigestKey = _KEY) -> StateDigest:
    """Return a digest of a tensor's bits, by words of eight bytes: secret but for another key."""
    flat = flat_bytes(tensor.detach())
    if flat.storage_offset() % 8:
        flat = flat.clone()
    end = len(flat) // 8 * 8
    words, rest = flat[:end].view(torch.int64), flat[end:]
    if not torch_kernels.on_host(flat):
        return torch_kernels.digest(key, words) + torch_kernels.digest(key, rest, end)
    found = host.digest(key, torch_kernels.host_array(words, np.uint64))
    return found + host.digest(key, torch_kernels.host_array(rest, np.uint8), end)


class SavedModel(NamedTuple):
    """The members and bits of a model, to be put back."""

    members: Members
    bits: SavedBits


@contextmanager
def undisturbed(
    modules: Iterable[nn.Module],
    tensors: Mapping[str, Tensor],
    again: Mapping[int, Callable[[], object]] = MappingProxyType({}),
) -> Iterator[SavedModel]:
    """Restore the members of some modules and the bits of some tensors, whatever the body does."""
    members, bits = Members(modules), SavedBits(tensors, again)
    try:
        yield SavedModel(members, bits)
    finally:
        members.put_back()
        bits.put_back()


@contextmanager
def restoring(members: Members) -> Iterator[None]:
    """Restore the members of some modules if the body raises; bits stay as they are."""
    try:
        yield
    except BaseException:
        members.put_back()
        raise


def tensors_in(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a module itself, with its dotted path."""
    return _values_in(module, Tensor)


def numbers_in(module: nn.Module) -> Iterator[tuple[str, float]]:
    return _values_in(module, float)


def _values_in(module: nn.Module, wanted: type) -> Iterator[tuple[str, Any]]:
    paths = {id(vars(module)): ""}
    for container in containers_of(module):
        prefix = paths[id(container)]
        for key, value in items(container).items() if container else ():
            is_wanted, inner = isinstance(value, wanted), container_of(value)
            if not is_wanted and inner is None:
                continue
            bare = not prefix and key in ("_parameters", "_buffers")
            path = prefix if bare else f"{prefix}.{key}" if prefix else str(key)
            if inner is not None:
                paths.setdefault(id(inner), path)
            if is_wanted:
                yield path, value


def same_number(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


def storage_of(tensor: Tensor) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def dressed(data: Tensor, tensor: Tensor) -> Any:
    """Make data a tensor of the class of another, with its attributes, such as its loader."""
    found: Any = data
    found.__class__ = tensor.__class__
    found.__dict__ = dict(vars(tensor))
    return found


def bytes_of(tensor: Tensor) -> bytes:
    return flat_bytes(tensor.detach()).cpu().numpy().tobytes()


def digest_of(tensor: Tensor) -> bytes:
    return blake2b(bytes_of(tensor)).digest()


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same form, device and bits."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return _equal(flat_bytes(one.detach()), flat_bytes(other.detach()))


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether flat bytes are equal, compared eight at a time, which is six times as fast."""
    if one.storage_offset() % 8 or other.storage_offset() % 8:
        return torch.equal(one, other)
    end = len(one) // 8 * 8
    words = [flat[:end].view(torch.int64) for flat in (one, other)]
    return torch.equal(*words) and torch.equal(one[end:], other[end:])


def containers_of(module: nn.Module, *, plain: bool = True) -> Iterator[Any]:
    """Yield the containers of a module, its own attributes first, each once.

    ``plain`` includes objects with tensors but without post-load processing.
    """
    acts = hasattr(type(module), ACTS)
    seen = {id(vars(module))}
    queue: list[tuple[Any, int, bool]] = [(vars(module), 0, acts)]
    for container, depth, follows in queue:
        yield container
        if depth > NESTED:
            continue
        for value in _values(container):
            if type(value) in LEAVES:
                continue
            inner = container_of(value)
            if inner is None or id(inner) in seen:
                continue
            here = follows or hasattr(type(value), ACTS)
            if inner is not value and not here and not (plain and _holds_tensors(value)):
                continue
            seen.add(id(inner))
            queue.append((inner, depth + 1, here))


def _holds_tensors(value: Any) -> bool:
    """Return whether an object itself keeps tensors, also in containers, except process groups."""
    if "distributed" in type(value).__module__:
        return False
    return any(
        isinstance(one, Tensor)
        for held in _values(vars(value))
        for one in (_values(held) if isinstance(held, dict | list | tuple) else (held,))
    )


def container_of(value: Any) -> Any:
    """Return a container itself, or the attributes of an object; ``None`` for anything else."""
    kind = _kind_of(type(value))  # type: ignore[arg-type] # types are hashable
    if kind == "object":
        return getattr(value, "__dict__", None)
    return value if kind == "container" else None


@cache
def _kind_of(of: type) -> Literal["container", "object", "leaf"]:
    if issubclass(of, dict | list | tuple | set):
        return "container"
    is_plain = not issubclass(of, nn.Module | Tensor | type | ModuleType | FunctionType)
    is_whole = hasattr(of, "__del__") or of.__name__.endswith(CONFIGURATION)
    return "object" if is_plain and not is_whole and of not in LEAVES else "leaf"


def items(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict):
        return dict(container)
    if not isinstance(container, set):
        return dict(enumerate(container))
    return {id(value): value for value in container}


def is_configuration(value: Any) -> bool:
    return type(value).__name__.endswith(CONFIGURATION)


def _values(container: Any) -> Iterable[Any]:
    return tuple(container.values() if isinstance(container, dict) else container)


def _refill(container: dict[Any, Any], before: dict[Any, Any]) -> None:
    if not _same(container, before):
        container.clear()
        container.update(before)


def _same(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    return (
        len(now) == len(before)
        and all(map(is_, now.values(), before.values()))
        and list(now) == list(before)
    )


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


HANDLES: Final = (torch.Stream, torch.Event, torch.Generator, PurePath, range, slice)
"""Other types of objects without weights, which are not inspected."""


DEEP: Final = 3  # depth to which nested objects are inspected


def is_opaque(module: nn.Module, visible: Container[int]) -> bool:
    """Return whether a module, or an object of its post-load processing, may hide weights.

    ``visible`` are the storages of the model's live tensors.
    """
    return any(
        may_hide_tensors(value) or any(storage_id(one) not in visible for one in _tensors_in(value))
        for box in containers_of(module, plain=False)
        for value in _values(box)
    )


def may_hide_tensors(value: Any, within: frozenset[int] = frozenset()) -> bool:
    """Return whether an object may hold tensors that cannot be found, as a closure does."""
    if id(value) in within:
        return False
    if isinstance(value, Tensor | nn.Module | Enum | type | ModuleType) or value is None:
        return False
    if isinstance(value, (*SIMPLE, *HANDLES)) or is_configuration(value):
        return False
    if container_of(value) is not None and not isinstance(value, partial):
        return False
    if isinstance(value, BuiltinFunctionType):
        return not isinstance(value.__self__, ModuleType | type | None)
    kept, within = _kept_by(value), within | {id(value)}
    return kept is None or any(
        isinstance(one, Tensor) or may_hide_tensors(one, within) for one in kept
    )


def _kept_by(value: Any) -> list[Any] | None:
    """Return the parts of an object without attributes; ``None`` if they are unknown."""
    if isinstance(value, frozenset):
        return list(value)
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # the cell is still empty
                defaults.append(cell.cell_contents)
        return defaults
    slots = [slot for one in type(value).__mro__ for slot in _slots(one)]
    return [getattr(value, slot) for slot in slots if hasattr(value, slot)] if slots else None


def _tensors_in(value: Any, within: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """Yield tensors reachable from an object through others, except modules and process groups."""
    kind = type(value)
    if isinstance(value, nn.Module) or "distributed" in kind.__module__:
        return
    if kind in LEAVES and kind is not FunctionType:
        return
    if id(value) in within or len(within) > DEEP:
        return
    inner = container_of(value)
    kept = [value.__self__] if isinstance(value, MethodType) else _kept_by(value) or []
    if inner is not None:
        kept = [*kept, *_values(inner)]
    elif is_configuration(value):
        kept = list(vars(value).values()) if hasattr(value, "__dict__") else kept
    for one in kept:
        if isinstance(one, Tensor):
            yield one
        else:
            yield from _tensors_in(one, within | {id(value)})


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
