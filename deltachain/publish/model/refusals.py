"""Weights that cannot be published, and what to do instead."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deltachain.errors import UnsupportedModelError
from deltachain.publish.model.layout import is_sharded, local_of
from deltachain.torch_names import TORCH_DTYPES, WIRE_NAMES, named_modules
from deltachain.types import TensorSpec

logger = logging.getLogger(__name__)

RESERVED: Final = "__metadata__"  # key of a safetensors header that is no tensor's name

_LAST_WORD: Final = re.compile(r"[^.]*[^.\d][^.]*(?=(\.\d+)*$)")
"""Last word of a name that is no number."""

_SCALE: Final = re.compile("scale|absmax$|^scb$")
"""What scales are called, in lower case: the latter two in bitsandbytes."""

_E8M0: Final = re.compile("^weight_scale$|_scales$")
"""Scales whose bytes are exponents: MX formats, as compressed-tensors and OpenAI store them."""

_NAN_OF_E8M0: Final = 255

_PUSH: Final = "or publish a checkpoint with `deltachain push`"

SAME_TENSORS: Final = (
    "all versions of a chain have the same tensors: attach another publisher, at a URL of its own"
)

_BETWEEN: Final = (
    "attach once a trainer has wrapped and converted the model, and publish between steps, when "
    f"FSDP has sharded everything again; otherwise {SAME_TENSORS}"
)

COMPARED_WHOLE: Final = (
    "publish an export, which is compared whole: "
    "Publisher(url).attach(lambda: model.state_dict().items()), and publish by hand"
)

GONE: Final = "is gone since the publisher was attached"
NEW: Final = "was not there when the publisher was attached"


def refuse_model(wrapper: nn.Module, model: nn.Module) -> None:
    """Refuse a model with weights outside of it, in adapters, or in pieces of unknown position."""
    inside = {id(parameter) for parameter in model.parameters()}
    for name, parameter in wrapper.named_parameters():
        if id(parameter) not in inside:
            raise UnsupportedModelError(
                f"{name!r} is a weight of {type(wrapper).__name__}, outside of the model in it",
                hint="make it a part of the model, or publish an export that yields it too, "
                f"{_PUSH}",
            )
    named = list(model.named_parameters())
    for name, one in named:  # as DeepSpeed and megatron-core mark them
        if not getattr(one, "allreduce", True) and getattr(one, "group_name", "") != "ep_size_1":
            raise UnsupportedModelError(
                f"{name!r} is an expert that other ranks have under the same name, not a copy",
                hint="use ep_size=1 of DeepSpeed; of Megatron, attach "
                "deltachain.integrations.megatron.shards(bridge, models); or publish an export "
                "that yields each expert under a name of its own",
            )
    adapters = [name or "model" for name, one in model.named_modules() if is_of_peft(one)]
    factors = [name for name, _ in named if ".lora_" in name]
    trained = {name for name, one in named if one.requires_grad} - set(factors)
    is_base_trained = not all(name.endswith(".magnitude") for name in trained)  # that is DoRA's
    for name in adapters or ([] if is_base_trained else factors):
        hint = (
            "Publisher(url).attach(lambda: adapter_tensors(model)), or of LoRA merged_tensors "
            "for what it makes of its base, both of deltachain.publish.model.lora"
        )
        if not adapters:
            hint = "Publisher(url).attach an export that yields what its library saves"
        raise UnsupportedModelError(
            f"{name!r} is an adapter: its base weights do not change",
            hint=f"{hint}; publish by hand",
        )


def is_of_peft(module: nn.Module) -> bool:
    return any(kind.__module__.startswith("peft.") for kind in type(module).__mro__)


def say_wrapped(model: nn.Module) -> None:
    """Log a model whose only content is another one, as that of a wrapper of another library."""
    children = dict(model.named_children())
    own = [*model.named_parameters(recurse=False), *model.named_buffers(recurse=False)]
    name, child = next(iter(children.items()), ("", model))
    if len(children) == 1 and not own and (name == "module" or hasattr(child, "save_pretrained")):
        logger.warning(
            "%s has nothing but %r: weights are published as '%s.*'; if it is a wrapper, give "
            "the model in it",
            type(model).__name__,
            name,
            name,
        )


def refuse_other_names(model: nn.Module, saved: Mapping[str, object]) -> None:
    """Refuse a model whose ``state_dict`` has other names or tensors than it has itself."""
    left, missing = set(saved), ""
    for at, path, module in named_modules(model):
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in (*parameters, *buffers):
            key = at + name if at + name in saved else path + name
            if saved.get(key) is tensor:
                left.discard(key)
            elif isinstance(tensor, nn.Parameter):
                missing = missing or path + name
    if other := min(left, default=missing):
        raise UnsupportedModelError(
            f"{other!r} is not the same in the model's state_dict() as in its parameters and "
            "buffers: a hook renames, replaces or removes it, or it is extra state",
            hint="publish what its checkpoints have: Publisher(url).attach(lambda: "
            "model.state_dict().items()), without what is no tensor; publish by hand",
        )


def refuse_lazy(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise UnsupportedModelError(
            f"{name!r} has no shape yet: its module is lazy, and has seen no input",
            hint="call the model once, with an input of the right size, then attach",
        )


def refuse_specs(specs: Iterable[TensorSpec]) -> None:
    for spec in specs:
        if spec.name == RESERVED:
            raise UnsupportedModelError(
                f"a weight is called {RESERVED!r}, a reserved key of safetensors files",
                hint="rename it, or publish an export that yields it under another name",
            )
        if not spec.numel:
            raise UnsupportedModelError(
                f"{spec.name!r} is empty: its shape is {spec.shape}",
                hint="attach once the model has its weights; leave a tensor that stays empty out: "
                "register_buffer(..., persistent=False), or publish an export without it",
            )


def refuse_tensor(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that has no bits of its own on the wire."""
    if tensor.is_meta:
        raise UnsupportedModelError(
            f"{name!r} has no data (meta device)", hint="attach and publish after loading"
        )
    if fault := _fault(tensor):
        what, instead = fault
        raise UnsupportedModelError(
            f"{name!r} is {what}", hint=f"publish an export that yields {instead}, {_PUSH}"
        )
    memory = tensor.untyped_storage().nbytes()
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.numel() and needed > memory:
        raise UnsupportedModelError(
            f"{name!r} needs {needed} bytes of memory, of which {memory} are there",
            hint="its memory was freed or resized, as offloading does: publish while the weights "
            "are loaded",
        )


def refuse_other_kind(name: str, tensor: Tensor, then: Tensor) -> None:
    """Refuse what an export yields if it is not as it was, or has no bits of its own."""
    if (tensor.shape, tensor.dtype) != (then.shape, then.dtype):
        raise UnsupportedModelError(
            f"{name!r} is {tensor.dtype}{tuple(tensor.shape)}, and was {then.dtype}"
            f"{tuple(then.shape)} when the publisher was attached",
            hint=SAME_TENSORS,
        )
    refuse_tensor(name, tensor)


def _fault(tensor: Tensor) -> tuple[str, str] | None:
    """Return what a tensor is that no checkpoint has, and what an export may yield instead."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return (
            f"a {type(tensor).__name__}, a tensor subclass that keeps its elements elsewhere",
            "it as plain tensors, for example by its `.dequantize()`",
        )
    if tensor.layout != torch.strided:
        return f"{tensor.layout}: a checkpoint has dense tensors only", "its `.to_dense()`"
    if tensor.dtype not in WIRE_NAMES:
        instead = "its codes and scales as tensors of their own"
        if tensor.is_complex():
            instead = "real tensors (`torch.view_as_real`)"
        elif tensor.is_floating_point():
            instead = "it in another dtype (`.to(torch.bfloat16)`)"
        return f"{tensor.dtype}, which has no wire form", instead
    if not tensor.is_contiguous():
        return (
            "not contiguous: its elements lie in another order than in a checkpoint, as in "
            "channels_last; `p.data = p.data.contiguous()` makes it so",
            "its `.contiguous()`",
        )
    if tensor.is_neg():
        return "a view of negated values", "its `.resolve_neg()`"
    return None


def refuse_overflow(spec: TensorSpec, values: Tensor) -> None:
    """Refuse finite values, of a part on this rank, that would be infinite in the wire dtype."""
    wanted = TORCH_DTYPES[spec.dtype]
    if not values.is_floating_point() or wanted == values.dtype:
        return
    limit = torch.finfo(wanted).max
    if torch.finfo(values.dtype).max < 2 * limit:  # fp32 and bf16 too
        return
    values = values.float() if values.itemsize == 1 else values
    if bool((values.isfinite() & (values.abs() > limit)).any()):
        raise UnsupportedModelError(
            f"{spec.name!r} has values above {limit:g}, which {spec.dtype} cannot have",
            hint="publish it in a dtype of a wider range, such as dtype='BF16'",
        )


@lru_cache(maxsize=1 << 16)
def _scale_word(name: str) -> str:
    """Return the last word of the name of a scale; empty for other names."""
    word = _LAST_WORD.search(name.lower())
    return word.group() if word and _SCALE.search(word.group()) else ""


def refuse_scale(spec: TensorSpec, values: Tensor) -> None:
    """Refuse a scale, known by its name, that is not finite: engines lose all that it scales."""
    word = _scale_word(spec.name)
    if not word:
        return
    lost = False
    if values.dtype == torch.uint8:
        lost = _E8M0.search(word) is not None and bool((values == _NAN_OF_E8M0).any())
    elif values.is_floating_point():
        cast = values.to(TORCH_DTYPES[spec.dtype])
        lost = not bool((cast.float() if cast.itemsize == 1 else cast).isfinite().all())
    if lost:
        raise UnsupportedModelError(
            f"{spec.name!r} is a scale that is not finite",
            hint="calibrate the scales or quantise the weights again, or remove them from the "
            "model; nothing was published",
        )


class MemoryRange(NamedTuple):
    """Where the elements of a live tensor are on this rank; for comparison, never to read there."""

    device: str
    start: int
    stop: int

    @classmethod
    def of(cls, tensor: Tensor) -> "MemoryRange":
        local = local_of(tensor)
        start = local.data_ptr()
        return cls(str(local.device), start, start + local.numel() * local.element_size())


class TensorForm(NamedTuple):
    """What a live tensor is on this rank; all but the last field never change."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of the part on this rank
    full: tuple[int, ...]
    placement: object  # placements and mesh of a DTensor
    is_trained: bool

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "TensorForm":
        local, sharded = local_of(tensor), cast("Any", tensor)
        refuse_tensor(name, local)
        placement = (sharded.placements, sharded.device_mesh) if is_sharded(tensor) else None
        return cls(local.dtype, local.shape, tensor.shape, placement, tensor.requires_grad)

    def __str__(self) -> str:
        placed = "" if self.placement is None else f" of {tuple(self.full)}, {self.placement}"
        return f"{self.dtype}{tuple(self.shape)}{placed}"


@dataclass(frozen=True, slots=True)
class ModelForm:
    tensors: Mapping[str, TensorForm]  # parameters and persistent buffers, by each of their names
    ties: Mapping[str, str]  # first name by further name

    @classmethod
    def of(cls, live: Sequence[tuple[str, Tensor]]) -> "ModelForm":
        """Look at all tensors of a model; no element is read."""
        first: dict[int, str] = {}
        names = {name: first.setdefault(id(tensor), name) for name, tensor in live}
        ties = {name: other for name, other in names.items() if name != other}
        return cls({name: TensorForm.of(name, tensor) for name, tensor in live}, ties)


def sharing(live: Sequence[tuple[str, Tensor]], frozen: Collection[str]) -> frozenset[str]:
    """Return the ``frozen`` tensors that share memory with a compared tensor."""
    if not frozen:
        return frozenset()
    first = {id(tensor): (name, tensor) for name, tensor in reversed(live)}  # not further names
    return overlapping({name: MemoryRange.of(tensor) for name, tensor in first.values()}, frozen)


def overlapping(memory: Mapping[str, MemoryRange], frozen: Collection[str]) -> frozenset[str]:
    """Return the ``frozen`` names whose memory overlaps the memory of a compared name."""
    found: set[str] = set()
    still: list[tuple[MemoryRange, str]] = []  # frozen ones that may reach the next tensor
    written = MemoryRange("", 0, 0)  # the compared one that reaches furthest
    for at, name in sorted((at, name) for name, at in memory.items() if at.start != at.stop):
        if name in frozen:
            if at.device == written.device and at.start < written.stop:
                found.add(name)
            still.append((at, name))
            continue
        found |= {
            one for one_at, one in still if one_at.device == at.device and one_at.stop > at.start
        }
        still = []
        if at.device != written.device or at.stop > written.stop:
            written = at
    return frozenset(found)


def refuse_changes(
    then: ModelForm, now: Sequence[tuple[str, Tensor]], *, frozen: Collection[str]
) -> None:
    """Refuse a model that no version of the chain can have, compared with what was attached.

    ``frozen`` are the names of tensors that are not compared with the snapshot.
    """
    live = dict(now)
    gone, new = then.tensors.keys() - live.keys(), live.keys() - then.tensors.keys()
    for name in (*sorted(gone), *sorted(new)):
        what = GONE if name in gone else NEW
        raise UnsupportedModelError(f"{name!r} {what}", hint=SAME_TENSORS)
    for name, tensor in now:
        # One at a time: to keep thousands of them alive would start the garbage collector.
        form = TensorForm.of(name, tensor)
        if form[:-1] != then.tensors[name][:-1]:
            raise UnsupportedModelError(
                f"{name!r} is {form}, and was {then.tensors[name]} when the publisher was attached",
                hint=_BETWEEN,
            )
        if name in frozen and form.is_trained:
            raise UnsupportedModelError(
                f"{name!r} was frozen when the publisher was attached, and is trained now",
                hint="close the publisher before unfreezing, and attach another one after it: the "
                "chain continues from its head",
            )
    for name, other in then.ties.items():
        if MemoryRange.of(live[name]) != MemoryRange.of(live[other]):
            raise UnsupportedModelError(
                f"{name!r} and {other!r} were one tensor when the publisher was attached, and are "
                "two now",
                hint="tie them again (`model.tie_weights()`), or attach another publisher, at a "
                "URL of its own",
            )
    for name in sorted(sharing(now, frozen)):
        raise UnsupportedModelError(
            f"{name!r} was frozen when the publisher was attached, and is now in the memory of a "
            "weight that is trained",
            hint="close this publisher, and attach another one: the chain continues from its head",
        )
