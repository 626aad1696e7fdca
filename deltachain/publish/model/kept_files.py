"""Whether the small files of a chain are those of its next version: a chain has one set of them."""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from deltachain.chain.chain import Chain
from deltachain.chain.checks import asset_path
from deltachain.chain.identity import read_asset
from deltachain.config_fields import differing_fields, fields
from deltachain.errors import ChainMismatchError
from deltachain.format.digest import object_digest
from deltachain.publish.model.tokenizer_files import (
    MAIN_FILES,
    TOKENIZER_FILE,
    tokenizer_difference,
)
from deltachain.publish.model.touched import read_config

logger = logging.getLogger(__name__)

_CONFIG: Final = "config.json"
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

_OF_A_RUN: Final = frozenset(
    {
        "__version__",
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "lora_dropout",
        "peft_version",
        "processor_class",
        "revision",
        "runtime_config",
    }
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
    """Check that the files beside the next version mean what those of the chain do.

    Fields of a run or of a library's release are no difference. Files that the version lacks, and
    those of unknown meaning, are told in a warning.

    Args:
        chain: The chain.
        files: Files beside the next version, by path.

    Raises:
        ChainMismatchError: A file that decides what is computed differs, or the chain lacks it.
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
        if name in refs or name == _GENERATION:
            what = _difference(name, theirs, files)
        else:
            what = "" if moved else "it is not in the chain"
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
    """Return the files of a tokenizer, and the configuration by which its class is found."""
    return {k: v for k, v in files.items() if k == _CONFIG or TOKENIZER_FILE.fullmatch(k)}


def _difference(name: str, theirs: Mapping[str, bytes], mine: Mapping[str, bytes]) -> str:
    """Describe the difference of a file that matters; empty if none does."""
    if name == _GENERATION:
        return differing_fields(_generation(theirs), _generation(mine))
    old, new = _plain(name, theirs[name]), _plain(name, mine[name])
    return "other bytes" if old is None or new is None else differing_fields(old, new)


def _plain(name: str, data: bytes) -> Any:  # noqa: ANN401 - JSON
    """Return what a file says of the computation; ``None`` if it is unreadable."""
    found = fields(data)
    if not isinstance(found, dict):
        return found
    if name == _CONFIG:
        return _complete(data, found)
    if name == _ADAPTER:
        found = _complete_adapter(data, found)
        found = {k: sorted(v) if _is_of_names(v) else v for k, v in found.items()}
    return {k: v for k, v in found.items() if k not in _OF_A_RUN and _says(v, k)}


def _says(value: object, name: str = "") -> bool:
    """Return whether a value is more than a default that a release began to write."""
    if value is False:
        return name.startswith(_TRUE_BY_DEFAULT)
    return value is not None and value not in ("", [], {})


def _is_of_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _generation(files: Mapping[str, bytes]) -> Any:  # noqa: ANN401 - JSON
    """Return how tokens are sampled: without a file of its own, ids are the configuration's."""
    found, config = fields(files.get(_GENERATION, b"{}")), fields(files.get(_CONFIG, b"{}"))
    if not isinstance(found, dict) or not isinstance(config, dict):
        return found
    inner = config.get("text_config")
    told = {**(inner if isinstance(inner, dict) else {}), **config}
    ids = {k: v for k, v in told.items() if k in ("bos_token_id", "eos_token_id")}
    found = ids | {k: v for k, v in found.items() if k != "pad_token_id"}
    return {k: v for k, v in found.items() if _says(v)}


def _complete(data: bytes, plain: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a configuration with its defaults, where transformers knows them.

    Releases differ in which fields they write, and in what these are called.
    """
    try:
        return fields(json.dumps(read_config(data).to_dict(), default=str).encode())
    except Exception as exc:  # noqa: BLE001 - absent, or a model that it does not know
        logger.debug("config.json is compared as it is: %s", exc)
        return plain


def _complete_adapter(data: bytes, plain: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of an adapter with its defaults, where PEFT knows them."""
    try:
        from peft import PeftConfig  # noqa: PLC0415 - slow, and only if files differ

        with tempfile.TemporaryDirectory(prefix="deltachain-adapter-") as scratch:
            (Path(scratch) / _ADAPTER).write_bytes(data)
            found = PeftConfig.from_pretrained(scratch).to_dict()
        complete = fields(json.dumps(found, default=_listed).encode())
    except Exception as exc:  # noqa: BLE001 - absent, or an adapter that it does not know
        logger.debug("%s is compared as it is: %s", _ADAPTER, exc)
        return plain
    return {**plain, **complete} if isinstance(complete, dict) else plain


def _listed(value: object) -> object:
    return sorted(value) if isinstance(value, set) else str(value)
