"""Whether two sets of tokenizer files mean the same, whichever release of a library wrote them."""

from __future__ import annotations

import copy
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from deltachain.config_fields import differing_fields, fields
from deltachain.errors import UnsupportedModelError
from deltachain.publish.model.touched import SavesItself, saved
from deltachain.publish.quantise.settings import CONFIG_FILE

logger = logging.getLogger(__name__)

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

_USE: Final = frozenset(
    {
        "version",
        "truncation",
        "padding",
        _TEMPLATE,
        "added_tokens_decoder",
        "backend",
        "is_local",
        "local_files_only",
        "max_length",
        "model_input_names",
        "model_max_length",
        "name_or_path",
        "pad_to_multiple_of",
        "pad_token",
        "pad_token_type_id",
        "padding_side",
        "processor_class",
        "special_tokens_map_file",
        "stride",
        "tokenizer_class",
        "tokenizer_file",
        "truncation_side",
        "truncation_strategy",
        "use_fast",
    }
)
"""Fields that the use of a tokenizer in training leaves in its files, that a release of a library
adds, or that are compared elsewhere."""


def tokenizer_difference(then: Mapping[str, bytes], now: Mapping[str, bytes]) -> tuple[str, str]:
    """Return the name of the file in which two tokenizers differ, and how; empty if in none.

    Files that differ are loaded and written anew, where transformers can load both: releases keep
    the same tokenizer in other files and fields.

    Args:
        then: Files of the one, by path, and its ``config.json``.
        now: Files of the other.
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
    """Return a function that checks that a tokenizer is as it was.

    That function raises:
        ConfigError: Its tokens or its template changed, of which followers have the files.
    """
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
    """Return what of a tokenizer or a processor decides what text and tokens mean."""
    found: Any = getattr(tokenizer, "tokenizer", tokenizer)
    special = getattr(found, "special_tokens_map", None)
    if not isinstance(special, dict):
        return {}
    told = {key: str(value) for key, value in special.items() if key not in _USE}
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
        if what := _difference(name, then[name], now[name]):
            return name, what
    return None


def _difference(name: str, then: bytes, now: bytes) -> str:
    if then == now:
        return ""
    if not name.endswith(".json"):
        return "other bytes"
    old, new = _plain(name, then), _plain(name, now)
    if old is None or new is None:
        return "other bytes"
    return differing_fields(old, new)


def _plain(name: str, data: bytes) -> Any:  # noqa: ANN401 - JSON
    """Return what a file says of a tokenizer; ``None`` if it is unreadable."""
    found = fields(_of_this_release(data) if name == _TOKENIZER else data)
    if not isinstance(found, dict) or name not in (_TOKENIZER, _SETTINGS, _SPECIAL):
        return found
    return {
        key: value["content"] if isinstance(value, dict) and "content" in value else value
        for key, value in found.items()
        if key not in _USE and value not in (None, False, "", [], {})
    }


def _of_this_release(data: bytes) -> bytes:
    """Return a ``tokenizer.json`` as the installed release writes it."""
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - only if files differ

        return Tokenizer.from_str(data.decode()).to_str().encode()
    except Exception as exc:  # noqa: BLE001 - absent, or a model that it does not know
        logger.debug("%s is compared as it is: %s", _TOKENIZER, exc)
        return data


def _written_anew(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files that the installed transformers writes of a tokenizer."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow, and only if files differ

    with tempfile.TemporaryDirectory(prefix="deltachain-tokenizer-") as scratch:
        for name, data in files.items():
            file = Path(scratch) / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)
        found: SavesItself = AutoTokenizer.from_pretrained(
            scratch, trust_remote_code=False, local_files_only=True
        )
        return saved(found, trusted=False, told=None)


def _template(files: Mapping[str, bytes]) -> object:
    """Return the template of a chat, wherever a release keeps it."""
    if f"{_TEMPLATE}.jinja" in files:
        return files[f"{_TEMPLATE}.jinja"].decode(errors="replace")
    for name in (_SETTINGS, f"{_TEMPLATE}.json"):
        config = fields(files.get(name, b""))
        if isinstance(config, dict) and config.get(_TEMPLATE):
            return config[_TEMPLATE]
    return None
