"""One look at a live model: what its tensors are, without their elements, and what is different.

Nothing is kept of a look but numbers: no tensor, and no address that is read from again.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from deltachain.checkpoint import left_out, read_assets
from deltachain.config_fields import LIBRARY, fields
from deltachain.errors import UnsupportedModelError
from deltachain.publish.model.refusals import refuse_tensor
from deltachain.publish.model.shard import is_sharded, local_of
from deltachain.publish.quantise.settings import CONFIG_FILE
from deltachain.types import TensorSpec

if TYPE_CHECKING:
    from torch import nn


logger = logging.getLogger(__name__)

_DTYPES: Final = ("dtype", "torch_dtype")

_STATED: Final = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
"""Dtypes of weights that are not quantised, and what configurations call them."""


@runtime_checkable
class SavesItself(Protocol):
    """A configuration or a tokenizer of transformers."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write its files into a folder."""


def saved(*things: object, trusted: bool, told: Collection[str] | None = ()) -> dict[str, bytes]:
    """Return the files that these write, as far as they write any; see :func:`read_assets`."""
    with tempfile.TemporaryDirectory(prefix="deltachain-assets-") as scratch:
        for thing in things:
            if isinstance(thing, SavesItself):
                try:
                    thing.save_pretrained(scratch)
                except ValueError as exc:  # a generation configuration that contradicts itself
                    logger.warning("%s was not saved: %s", type(thing).__name__, exc)
        return read_assets(Path(scratch), trusted=trusted, told=told)


def own_parts(model: nn.Module) -> tuple[object, ...]:
    """Return what writes the files of a model besides its weights."""
    return tuple(getattr(model, name, None) for name in ("config", "generation_config"))


def with_touched(
    origin: Mapping[str, bytes], folder: Path, model: nn.Module, *others: object, trusted: bool
) -> dict[str, bytes]:
    """Return the files of the folder that a model was loaded from, and what was changed since.

    A part that is loaded anew from there writes the same files as the model's, unless that was
    changed. Files of changed parts are those that they write now.

    Args:
        origin: Files of the folder, by path.
        folder: The folder.
        model: The model, unwrapped.
        others: Tokenizer or processor of the model.
        trusted: Whether references to remote code are kept.
    """
    files, told = dict(origin), left_out(folder)
    for part in (*own_parts(model), *others):
        if not isinstance(part, SavesItself) or not _is_written(part, origin):
            continue
        now = saved(part, trusted=trusted, told=told)
        then = _loaded_anew(part, folder, trusted=trusted)
        if CONFIG_FILE in now:
            now[CONFIG_FILE] = with_architecture(now[CONFIG_FILE], model)
        for name in now.keys() | then.keys():
            if name not in now:
                files.pop(name, None)
            elif name not in then or _differ(name, now[name], then[name]):
                logger.info("%s was changed since the model was loaded from %s", name, folder)
                files[name] = _with_dtypes(now[name], origin.get(name), name)
    return files


def _is_written(part: SavesItself, origin: Mapping[str, bytes]) -> bool:
    """Return whether a part is one of its own: models without a file have a derived generation."""
    derived = getattr(part, "_from_model_config", False)
    return not derived or "generation_config.json" in origin


def _loaded_anew(part: SavesItself, folder: Path, *, trusted: bool) -> dict[str, bytes]:
    load = getattr(type(part), "from_pretrained", None)
    if load is None:
        return {}
    try:
        return saved(load(str(folder)), trusted=trusted, told=None)
    except Exception as exc:  # noqa: BLE001 - of any library; its files are then all its own
        logger.debug("%s does not load as %s: %s", folder, type(part).__name__, exc)
        return {}


def read_config(data: bytes) -> Any:  # noqa: ANN401 - of transformers
    """Return the configuration of transformers in a file; no code of the file's author is run.

    Any exception is raised if transformers is absent or does not know the model.
    """
    from transformers import AutoConfig  # noqa: PLC0415 - slow, and seldom needed

    with tempfile.TemporaryDirectory(prefix="deltachain-config-") as scratch:
        (Path(scratch) / CONFIG_FILE).write_bytes(data)
        return AutoConfig.from_pretrained(scratch, trust_remote_code=False)


def _differ(name: str, one: bytes, other: bytes) -> bool:
    if one == other:
        return False
    return not name.endswith("config.json") or fields(one) != fields(other)


def with_architecture(data: bytes, model: nn.Module) -> bytes:
    """Return a configuration that names the model's class, as ``save_pretrained`` of it does.

    Of subclasses, such as those that shard, the class that was named stays.
    """
    config = json.loads(data)
    named = config.get("architectures") or []
    if not hasattr(model, "save_pretrained") or any(
        c.__name__ in named for c in type(model).__mro__
    ):
        return data
    config["architectures"] = [type(model).__name__]
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"


def with_dtype_of(files: Mapping[str, bytes], specs: Iterable[TensorSpec]) -> dict[str, bytes]:
    """Return files whose configuration states the dtype of the weights, as saving them would.

    Loading casts all weights to the stated dtype: that of most of their elements. A part of the
    model may state another one that some of them have. Nothing is added, and configurations of
    quantised weights stay as they are.

    Args:
        files: Small files of a checkpoint, by path.
        specs: Its tensors.
    """
    made = dict(files)
    numel: Counter[str] = Counter()
    for spec in specs:
        if spec.dtype.startswith(("F", "BF")):
            numel[spec.dtype] += spec.numel
    wanted = _STATED.get(max(numel, key=numel.__getitem__, default=""))
    try:
        config = json.loads(files.get(CONFIG_FILE, b""))
    except (ValueError, RecursionError):
        return made
    if wanted is not None and isinstance(config, dict) and LIBRARY not in config:
        has = frozenset(_STATED[name] for name in numel if name in _STATED)
        if (stated := _stating(config, wanted, frozenset((wanted,)), has)) != config:
            made[CONFIG_FILE] = json.dumps(stated, indent=2, ensure_ascii=False).encode() + b"\n"
    return made


def _stating(
    config: Mapping[str, Any], wanted: str, fine: frozenset[str], fine_inside: frozenset[str]
) -> dict[str, Any]:
    """Return a configuration with the wanted dtype in place of others.

    Args:
        config: The configuration, or the part of it that describes a part of the model.
        wanted: The dtype.
        fine: Dtypes that it may state.
        fine_inside: Dtypes that its parts may state.
    """
    made = dict(config)
    for key, value in config.items():
        if key in _DTYPES and value in _STATED.values() and value not in fine:
            made[key] = wanted
        elif key.endswith("_config") and isinstance(value, dict) and LIBRARY not in value:
            made[key] = _stating(value, wanted, fine_inside, fine_inside)
    return made


def _with_dtypes(data: bytes, origin: bytes | None, name: str) -> bytes:
    """Return a configuration with the dtypes of the checkpoint's own: masters have others.

    Dequantised weights have the dtypes of the model.
    """
    known = None if origin is None else json.loads(origin) if name == CONFIG_FILE else None
    if not isinstance(known, dict):
        return data
    made = json.loads(data)
    if known.get(LIBRARY) and not made.get(LIBRARY):
        return data
    made = _dtyped(made, known)
    return json.dumps(made, indent=2, ensure_ascii=False).encode() + b"\n"


def _dtyped(made: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in made.items() if key not in _DTYPES}
    kept |= {key: known[key] for key in _DTYPES if key in known}
    for key, value in kept.items():
        if isinstance(value, dict) and isinstance(known.get(key), dict):
            kept[key] = _dtyped(value, known[key])
    return kept


SAME_TENSORS: Final = (
    "all versions of a chain have the same tensors: attach another publisher, at a URL of its own"
)

_BETWEEN: Final = (
    f"publish between steps, when FSDP has sharded everything again; otherwise {SAME_TENSORS}"
)


class MemoryRange(NamedTuple):
    """Where the elements of a live tensor are on this rank; for comparison, never to read there."""

    device: str
    start: int
    stop: int


class TensorForm(NamedTuple):
    """What a live tensor is on this rank.

    Attributes:
        dtype: Its dtype.
        shape: Shape of the part on this rank.
        full: Shape of the whole tensor.
        placement: Placements and mesh of a ``DTensor``; ``None`` for a plain one.
        is_trained: Whether it requires a gradient.
        memory: Where its elements are.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    full: tuple[int, ...]
    placement: object
    is_trained: bool
    memory: MemoryRange

    @property
    def kept(self) -> tuple[object, ...]:
        """What must stay as it is."""
        return self[:4]

    def __str__(self) -> str:
        """Return dtype and shape, and the placement of a ``DTensor``."""
        placed = "" if self.placement is None else f" of {self.full}, {self.placement}"
        return f"{self.dtype}{self.shape}{placed}"


@dataclass(frozen=True, slots=True)
class ModelForm:
    """What a live model is on this rank.

    Attributes:
        tensors: Its parameters and persistent buffers, by each of their names.
        ties: First name by further name of a tied tensor.
    """

    tensors: Mapping[str, TensorForm]
    ties: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, live: Iterable[tuple[str, Tensor]]) -> ModelForm:
        """Look at all tensors of a model; no element is read.

        Raises:
            ConfigError: A tensor has no bits of its own, or its memory is gone.
        """
        first: dict[int, str] = {}
        tensors: dict[str, TensorForm] = {}
        ties: dict[str, str] = {}
        for name, tensor in live:
            seen = first.setdefault(id(tensor), name)
            if seen == name:
                tensors[name] = form_of(name, tensor)
            else:
                tensors[name], ties[name] = tensors[seen], seen
        return cls(tensors, ties)

    def shared(self, frozen: Collection[str]) -> frozenset[str]:
        """Return those of some tensors whose memory another tensor has a part of.

        Args:
            frozen: Names of tensors that are not compared; those of others do not count.
        """
        if not frozen:
            return frozenset()
        found: set[str] = set()
        still: list[tuple[MemoryRange, str]] = []  # frozen ones that may reach the next tensor
        written = MemoryRange("", 0, 0)  # the compared one that reaches furthest
        for memory, name in sorted((form.memory, name) for name, form in self.tensors.items()):
            if name in self.ties or memory.start == memory.stop:
                continue
            if name in frozen:
                if memory.device == written.device and memory.start < written.stop:
                    found.add(name)
                still.append((memory, name))
                continue
            reached = (one for at, one in still if at.device == memory.device)
            found |= {one for one in reached if self.tensors[one].memory.stop > memory.start}
            still = []
            if memory.device != written.device or memory.stop > written.stop:
                written = memory
        return frozenset(found)


def form_of(name: str, tensor: Tensor) -> TensorForm:
    """Return what a live tensor is.

    Raises:
        ConfigError: It has no bits of its own, or its memory is gone.
    """
    local = local_of(tensor)
    refuse_tensor(name, local)
    start, placement = local.data_ptr(), None
    if is_sharded(tensor):
        sharded: Any = tensor
        placement = sharded.placements, sharded.device_mesh
    memory = MemoryRange(str(local.device), start, start + local.numel() * local.element_size())
    return TensorForm(
        local.dtype,
        tuple(local.shape),
        tuple(tensor.shape),
        placement,
        tensor.requires_grad,
        memory,
    )


def refuse_changes(then: ModelForm, now: ModelForm, *, frozen: Collection[str]) -> None:
    """Compare a model with what was attached; refuse what no version of the chain can have.

    Other elements, other memory and another device are followed.

    Args:
        then: The model when it was attached.
        now: The model as it is.
        frozen: Names of tensors that are not compared with the snapshot.

    Raises:
        ConfigError: A tensor is gone, new, of another shape, dtype or sharding, or parted from one
            that it was tied to; or a frozen one is trained, or in memory of one that is compared.
    """
    for name in (*then.tensors, *now.tensors):
        if name not in now.tensors:
            raise UnsupportedModelError(
                f"{name!r} is gone since the publisher was attached", hint=SAME_TENSORS
            )
        if name not in then.tensors:
            raise UnsupportedModelError(
                f"{name!r} was not there when the publisher was attached", hint=SAME_TENSORS
            )
    for name, form in now.tensors.items():
        _refuse_change(name, then.tensors[name], form, is_frozen=name in frozen)
    for name, other in then.ties.items():
        if now.tensors[name].memory != now.tensors[other].memory:
            raise UnsupportedModelError(
                f"{name!r} and {other!r} were one tensor when the publisher was attached, and are "
                "two now",
                hint="tie them again (`model.tie_weights()`), or attach another publisher, at a "
                "URL of its own",
            )
    for name in sorted(now.shared(frozen)):
        raise UnsupportedModelError(
            f"{name!r} was frozen when the publisher was attached, and is now in the memory of a "
            "weight that is trained",
            hint="close this publisher, and attach another one: the chain goes on from its head",
        )


def _refuse_change(name: str, then: TensorForm, now: TensorForm, *, is_frozen: bool) -> None:
    if now.kept != then.kept:
        raise UnsupportedModelError(
            f"{name!r} is {now}, and was {then} when the publisher was attached", hint=_BETWEEN
        )
    if is_frozen and now.is_trained:
        raise UnsupportedModelError(
            f"{name!r} was frozen when the publisher was attached, and is trained now",
            hint="close the publisher before unfreezing, and attach another one after it: the "
            "chain goes on from its head",
        )
