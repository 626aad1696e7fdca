"""Files that a model and its tokenizer would write now, where these were changed since loading."""

from __future__ import annotations

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from deltachain.checkpoint import left_out, read_assets
from deltachain.config_fields import LIBRARY, fields
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
