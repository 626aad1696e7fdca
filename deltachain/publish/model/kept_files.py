"""Small files of a checkpoint besides its weights: what a model writes, and what its chain keeps.

A chain has one set of them, which its next version must have too. Needs no torch.
"""

import copy
import json
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from deltachain.chain.chain import Chain
from deltachain.chain.checks import asset_path
from deltachain.chain.identity import read_asset
from deltachain.checkpoint import LIBRARY, differing_fields, fields, left_out, read_assets
from deltachain.errors import ChainMismatchError, UnsupportedModelError
from deltachain.format.keys import object_digest
from deltachain.types import TensorSpec

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

CONFIG_FILE: Final = "config.json"

_DTYPES: Final = ("dtype", "torch_dtype")

_STATED: Final = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
"""Dtypes of weights that are not quantised, and what configurations call them."""


@runtime_checkable
class SavesItself(Protocol):
    """A configuration or a tokenizer of transformers."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write its files into a folder."""


def saved(*things: object, trusted: bool, told: Collection[str] | None = ()) -> dict[str, bytes]:
    with _folder_of({}) as scratch:
        for thing in things:
            if isinstance(thing, SavesItself):
                try:
                    thing.save_pretrained(scratch)
                except ValueError as exc:  # a generation configuration that contradicts itself
                    logger.warning("%s was not saved: %s", type(thing).__name__, exc)
        return read_assets(Path(scratch), trusted=trusted, told=told)


def own_parts(model: "nn.Module") -> tuple[object, ...]:
    return tuple(getattr(model, name, None) for name in ("config", "generation_config"))


def with_touched(
    origin: Mapping[str, bytes], folder: Path, model: "nn.Module", *others: object, trusted: bool
) -> dict[str, bytes]:
    """Return the files of the folder that a model was loaded from, and what was changed since.

    A part that is loaded anew from there writes the same files, unless that was changed.
    """
    files, told = dict(origin), left_out(folder)
    for part in (*own_parts(model), *others):
        # Models without a file for it have a derived generation configuration.
        derived = getattr(part, "_from_model_config", False)
        if not isinstance(part, SavesItself) or (derived and _GENERATION not in origin):
            continue
        now = saved(part, trusted=trusted, told=told)
        then = _loaded_anew(part, folder, trusted=trusted)
        if CONFIG_FILE in now:
            now[CONFIG_FILE] = with_architecture(now[CONFIG_FILE], model)
        for name in now.keys() | then.keys():
            if name not in now:
                files.pop(name, None)
            elif name not in then or (
                now[name] != then[name]
                and not (name.endswith(CONFIG_FILE) and fields(now[name]) == fields(then[name]))
            ):
                logger.info("%s was changed since the model was loaded from %s", name, folder)
                files[name] = _with_dtypes(now[name], origin.get(name), name)
    return files


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
    """Return the configuration of transformers in a file; no code of the file's author is run."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow, and seldom needed

    with _folder_of({CONFIG_FILE: data}) as scratch:
        return AutoConfig.from_pretrained(scratch, trust_remote_code=False)


@contextmanager
def _folder_of(files: Mapping[str, bytes]) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="deltachain-assets-") as scratch:
        for name, data in files.items():
            file = Path(scratch) / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)
        yield scratch


def with_architecture(data: bytes, model: "nn.Module") -> bytes:
    """Return a configuration that names the model's class, or one that it is a subclass of."""
    config = json.loads(data)
    named = config.get("architectures") or []
    if not hasattr(model, "save_pretrained") or any(
        c.__name__ in named for c in type(model).__mro__
    ):
        return data
    return _written({**config, "architectures": [type(model).__name__]})


def with_dtype_of(files: Mapping[str, bytes], specs: Iterable[TensorSpec]) -> dict[str, bytes]:
    """Return files whose configuration states the dtype of most elements: loading casts to it.

    A part of the model may state another one that some weights have. Nothing is added, and
    configurations of quantised weights stay as they are.
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
            made[CONFIG_FILE] = _written(stated)
    return made


def _written(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"


def _stating(
    config: Mapping[str, Any], wanted: str, fine: frozenset[str], fine_inside: frozenset[str]
) -> dict[str, Any]:
    """Return a configuration with a wanted dtype in place of others than the fine ones."""
    made = dict(config)
    for key, value in config.items():
        if key in _DTYPES and value in _STATED.values() and value not in fine:
            made[key] = wanted
        elif key.endswith("_config") and isinstance(value, dict) and LIBRARY not in value:
            made[key] = _stating(value, wanted, fine_inside, fine_inside)
    return made


def _with_dtypes(data: bytes, origin: bytes | None, name: str) -> bytes:
    """Return a configuration with the dtypes of the checkpoint's own: masters have others."""
    known = None if origin is None else json.loads(origin) if name == CONFIG_FILE else None
    if not isinstance(known, dict):
        return data
    made = json.loads(data)
    if known.get(LIBRARY) and not made.get(LIBRARY):
        return data
    return _written(_dtyped(made, known))


def _dtyped(made: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in made.items() if key not in _DTYPES}
    kept |= {key: known[key] for key in _DTYPES if key in known}
    for key, value in kept.items():
        if isinstance(value, dict) and isinstance(known.get(key), dict):
            kept[key] = _dtyped(value, known[key])
    return kept


TOKENIZER_FILE: Final = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|normalizer\.json|tekken\.json"
    r"|.*(vocab|merges).*\.(json|txt)|.*\.(model|spm|tiktoken|bpe|codes|jinja)"
    r"|chat_template.*|additional_chat_templates/.*"
)
"""Paths of the files that decide what text and tokens mean."""

_TOKENIZER: Final = "tokenizer.json"
_SETTINGS: Final = "tokenizer_config.json"
_SPECIAL: Final = "special_tokens_map.json"
_TEMPLATE: Final = "chat_template"

MAIN_FILES: Final = frozenset({_TOKENIZER, _SETTINGS})
"""Names of files that every whole tokenizer has, one of them or both."""

_PARTS: Final = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
"""Steps of a tokenizer of the tokenizers library, apart from its words."""

_USE: Final = re.compile(
    r"version|truncation(_side|_strategy)?|padding(_side)?|chat_template|added_tokens_decoder|backend"
    r"|is_local|local_files_only|(model_)?max_length|model_input_names|name_or_path"
    r"|pad_to_multiple_of|pad_token|pad_token_type_id|processor_class|special_tokens_map_file|stride"
    r"|tokenizer_(class|file)|use_fast"
)
"""Fields that the use of a tokenizer in training leaves in its files, that a release of a library
adds, or that are compared elsewhere."""


def tokenizer_difference(then: Mapping[str, bytes], now: Mapping[str, bytes]) -> tuple[str, str]:
    """Return the name of the file in which two tokenizers differ, and how; empty if in none.

    Releases keep the same tokenizer in other files and fields, so that files that differ are loaded
    and written anew.
    """
    both = then.keys() & now.keys()
    if found := _first(then, now, both - {_TOKENIZER, _SETTINGS}):
        return found
    if _template(then) != _template(now):
        return f"{_TEMPLATE}.jinja", f"other chat template, there or in {_SETTINGS}"
    if not _first(then, now, then.keys() | now.keys()):
        return "", ""
    try:
        one, other = _written_anew(then), _written_anew(now)
    except Exception as exc:  # noqa: BLE001 - absent, or a tokenizer that it does not know
        logger.debug("files of tokenizers are compared as they are: %s", exc)
        names = both if _TOKENIZER in both else then.keys() | now.keys()
        return _first(then, now, names) or ("", "")
    if found := _first(one, other, one.keys() | other.keys()):
        return found
    if unread := _first(then, now, both):
        logger.warning(
            "%s differs from the chain's in %s, and the installed transformers makes the same "
            "tokenizer of both: followers keep the file that the chain began with",
            *unread,
        )
    return "", ""


def watched(tokenizer: object) -> Callable[[], None]:
    """Return a function that refuses a tokenizer whose tokens or template changed since."""
    then = _state(tokenizer)

    def check() -> None:
        now = _state(tokenizer)
        if changed := sorted(k for k in then.keys() | now.keys() if then.get(k) != now.get(k)):
            raise UnsupportedModelError(
                f"the tokenizer changed in {', '.join(changed)} since the publisher was attached",
                hint="followers have the files of that time: change the tokenizer before training, "
                "and publish to another URL; or set it back",
            )

    return check


def _state(tokenizer: object) -> dict[str, object]:
    found: Any = getattr(tokenizer, "tokenizer", tokenizer)
    special = getattr(found, "special_tokens_map", None)
    if not isinstance(special, dict):
        return {}
    told = {key: str(value) for key, value in special.items() if not _USE.fullmatch(key)}
    template = getattr(tokenizer, _TEMPLATE, None)
    backend = getattr(found, "backend_tokenizer", None)
    told |= {part: str(getattr(backend, part, None)) for part in _PARTS}
    return {**told, "number of tokens": len(found), _TEMPLATE: copy.copy(template)}


def _first(
    then: Mapping[str, bytes], now: Mapping[str, bytes], names: Iterable[str]
) -> tuple[str, str] | None:
    """Return the first name of a file that differs or is in one set only, and how."""
    for name in sorted(set(names) - {f"{_TEMPLATE}.jinja", CONFIG_FILE}):
        if name not in then or name not in now:
            return name, f"it is not in the {'chain' if name in now else 'checkpoint'}"
        if what := _token_difference(name, then[name], now[name]):
            return name, what
    return None


def _token_difference(name: str, then: bytes, now: bytes) -> str:
    if then == now:
        return ""
    is_json = name.endswith(".json")
    old, new = (_plain_tokens(name, one) if is_json else None for one in (then, now))
    return "other bytes" if old is None or new is None else differing_fields(old, new)


def _plain_tokens(name: str, data: bytes) -> Any:  # noqa: ANN401 - JSON
    found = fields(data)
    if name == _TOKENIZER:  # as the installed release writes it
        found = _read_by(lambda: _tokenizer_json(data), found, name)
    if not isinstance(found, dict) or name not in (_TOKENIZER, _SETTINGS, _SPECIAL):
        return found
    return {
        key: value["content"] if isinstance(value, dict) and "content" in value else value
        for key, value in found.items()
        if not _USE.fullmatch(key) and value not in (None, False, "", [], {})
    }


def _read_by(read: Callable[[], object], plain: Any, name: str) -> Any:  # noqa: ANN401 - JSON
    """Return what a library makes of a file; what the file says, where it cannot read that."""
    try:
        return fields(json.dumps(read(), default=_listed).encode())
    except Exception as exc:  # noqa: BLE001 - absent, or of a model that it does not know
        logger.debug("%s is compared as it is: %s", name, exc)
        return plain


def _listed(value: object) -> object:
    return sorted(value) if isinstance(value, set) else str(value)


def _tokenizer_json(data: bytes) -> object:
    from tokenizers import Tokenizer  # noqa: PLC0415 - only if files differ

    return json.loads(Tokenizer.from_str(data.decode()).to_str())


def _adapter_json(data: bytes) -> object:
    from peft import PeftConfig  # noqa: PLC0415 - slow, and only if files differ

    with _folder_of({_ADAPTER: data}) as scratch:
        return PeftConfig.from_pretrained(scratch).to_dict()


def _written_anew(files: Mapping[str, bytes]) -> dict[str, bytes]:
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow, and only if files differ

    with _folder_of(files) as scratch:
        found: SavesItself = AutoTokenizer.from_pretrained(
            scratch, trust_remote_code=False, local_files_only=True
        )
        return saved(found, trusted=False, told=None)


def _template(files: Mapping[str, bytes]) -> object:
    if f"{_TEMPLATE}.jinja" in files:
        return files[f"{_TEMPLATE}.jinja"].decode(errors="replace")
    for name in (_SETTINGS, f"{_TEMPLATE}.json"):
        config = fields(files.get(name, b""))
        if isinstance(config, dict) and config.get(_TEMPLATE):
            return config[_TEMPLATE]
    return None


_GENERATION: Final = "generation_config.json"
_ADAPTER: Final = "adapter_config.json"
_PROCESSORS: Final = frozenset(
    {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
)
"""Files of processors, of which releases write some or others."""

_MEANT: Final = re.compile(
    r"config\.json|(generation|adapter|(\w+_)?preprocessor|processor|sentence_\w+|hf_quant"
    r"|quantize|quant)_config\.json|config_sentence_transformers\.json|modules\.json|params\.json"
    r"|[0-9]+_\w+/.*"
)
"""Paths of files that decide the computation, apart from files of a tokenizer."""

_OF_A_RUN: Final = re.compile(
    r"__version__|auto_mapping|base_model_name_or_path|inference_mode|lora_dropout|peft_version"
    r"|processor_class|revision|runtime_config"
)
"""Fields of these files that tell of a run or of a release."""

_TRUE_BY_DEFAULT: Final = ("do_", "include_prompt")
"""Begin of the fields of processors and of pooling that are true where they are absent."""

_HINT: Final = (
    "followers of a chain have the files that it began with: publish these weights to another URL; "
    "or, if the chain's files are right for them, put those in place of the changed ones "
    "(`deltachain pull URL --out FOLDER` writes them)"
)


def check_files(chain: Chain, files: Mapping[str, bytes]) -> None:
    """Refuse files beside the next version that mean something else than those of the chain.

    Files that the version lacks, and those of unknown meaning, are told in a warning.
    """
    refs = {asset_path(ref): ref for ref in chain.identity.assets}
    if not files or not refs:
        return
    differing = {
        name
        for name in files.keys() | refs.keys()
        if name not in files or name not in refs or object_digest(files[name]) != refs[name].blake3
    }
    if not differing:
        return
    words = set(filter(TOKENIZER_FILE.fullmatch, differing))
    speaks = bool(words) and not files.keys().isdisjoint(MAIN_FILES | words)
    theirs = {
        name: files[name] if name not in differing else read_asset(chain.store, ref)
        for name, ref in refs.items()
        if (_MEANT.fullmatch(name) and name in files) or (speaks and TOKENIZER_FILE.fullmatch(name))
    }
    for name in sorted(filter(_MEANT.fullmatch, differing & files.keys())):
        moved = name in _PROCESSORS and _PROCESSORS & refs.keys() - files.keys()
        what = "" if moved else "it is not in the chain"
        if name in refs or name == _GENERATION:
            what = _difference(name, theirs, files)
        if what:
            raise _mismatch(chain, name, what)
    if speaks:
        name, what = tokenizer_difference(_of_tokenizer(theirs), _of_tokenizer(files))
        if name:
            raise _mismatch(chain, name, what)
    _tell(chain, "this version has none of", refs.keys() - files.keys())
    _tell(chain, "there are others of", (files.keys() & differing) - theirs.keys())


def _mismatch(chain: Chain, name: str, what: str) -> ChainMismatchError:
    return ChainMismatchError(
        f"{name} differs from the file of the chain at {chain.store.url}: {what}", hint=_HINT
    )


def _tell(chain: Chain, what: str, names: Collection[str]) -> None:
    if names:
        logger.warning(
            "%s: %s %s: followers keep what the chain began with",
            chain.store.url,
            what,
            ", ".join(sorted(names)),
        )


def _of_tokenizer(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {k: v for k, v in files.items() if k == CONFIG_FILE or TOKENIZER_FILE.fullmatch(k)}


def _difference(name: str, theirs: Mapping[str, bytes], mine: Mapping[str, bytes]) -> str:
    if name == _GENERATION:
        return differing_fields(_generation(theirs), _generation(mine))
    old, new = _plain(name, theirs[name]), _plain(name, mine[name])
    return "other bytes" if old is None or new is None else differing_fields(old, new)


def _plain(name: str, data: bytes) -> Any:  # noqa: ANN401 - JSON
    found = fields(data)
    if not isinstance(found, dict):
        return found
    if name == CONFIG_FILE:  # with defaults: releases differ in the fields that they write
        return _read_by(lambda: read_config(data).to_dict(), found, name)
    if name == _ADAPTER:
        found |= _read_by(lambda: _adapter_json(data), {}, name)
        lists = {k: v for k, v in found.items() if isinstance(v, list)}
        found |= {k: sorted(v) for k, v in lists.items() if all(isinstance(one, str) for one in v)}
    return {k: v for k, v in found.items() if not _OF_A_RUN.fullmatch(k) and _says(v, k)}


def _says(value: object, name: str = "") -> bool:
    if value is False:
        return name.startswith(_TRUE_BY_DEFAULT)
    return value is not None and value not in ("", [], {})


def _generation(files: Mapping[str, bytes]) -> Any:  # noqa: ANN401 - JSON
    """Return how tokens are sampled: without a file of its own, ids are the configuration's."""
    found, config = fields(files.get(_GENERATION, b"{}")), fields(files.get(CONFIG_FILE, b"{}"))
    if not isinstance(found, dict) or not isinstance(config, dict):
        return found
    inner = config.get("text_config")
    told = {**(inner if isinstance(inner, dict) else {}), **config}
    ids = {k: v for k, v in told.items() if k in ("bos_token_id", "eos_token_id")}
    found = ids | {k: v for k, v in found.items() if k != "pad_token_id"}
    return {k: v for k, v in found.items() if _says(v)}
