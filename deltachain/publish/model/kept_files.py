"""Whether the small files of a chain are those of its next version: a chain has one set of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

from deltachain.chain.chain import Chain
from deltachain.chain.checks import asset_path
from deltachain.chain.identity import read_asset
from deltachain.errors import ChainMismatchError
from deltachain.format.digest import object_digest
from deltachain.publish.model.touched import differing_fields, fields, read_config

logger = logging.getLogger(__name__)

_CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"
_TOKENIZER: Final = "tokenizer.json"
_TEMPLATE: Final = "chat_template"
_WORDS: Final = (
    ".model",
    ".spm",
    ".tiktoken",
    ".bpe",
    ".jinja",
    "merges.txt",
    "vocab.txt",
    "vocab.json",
)
"""Ends of the names of files that decide what text and tokens mean."""

_HINT: Final = (
    "followers of a chain have the files that it began with: publish these weights to another URL; "
    "or, if the chain's files are right for them, put those in place of the changed ones "
    "(`deltachain pull URL --out FOLDER` writes them)"
)


def check_files(chain: Chain, files: Mapping[str, bytes]) -> None:
    """Check that the files beside the next version mean what those of the chain do.

    Files that the chain or the version lacks are no difference, nor are fields of a run.

    Args:
        chain: The chain.
        files: Files beside the next version, by path.

    Raises:
        ChainMismatchError: Configuration, generation settings, vocabulary or template differ.
    """
    if not files or not chain.identity.assets:
        return
    theirs = dict(_read(chain, files))
    for name in sorted(files.keys() & theirs.keys()):
        if files[name] == theirs[name]:
            continue
        what = _difference(name, theirs[name], files[name])
        if what:
            raise ChainMismatchError(
                f"{name} differs from that of the chain at {chain.store.url}: {what}", hint=_HINT
            )
    if (told := _template(theirs)) and (now := _template(files)) and told != now:
        raise ChainMismatchError(
            f"the chat template differs from that of the chain at {chain.store.url} "
            "(chat_template.jinja, tokenizer_config.json)",
            hint=_HINT,
        )


def _read(chain: Chain, files: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a chain that are compared; those with equal digests are not fetched."""
    for ref in chain.identity.assets:
        path = asset_path(ref)
        mine = files.get(path)
        if mine is not None and object_digest(mine) == ref.blake3:
            yield path, mine
        elif mine is not None or _TEMPLATE in path or path == "tokenizer_config.json":
            yield path, read_asset(chain.store, ref)


def _difference(name: str, then: bytes, now: bytes) -> str:
    """Describe the difference of a file that matters; empty if none does."""
    if name in (_CONFIG, _GENERATION):
        old, new = fields(then), fields(now)
        if name == _CONFIG:
            old, new = _complete(then, old), _complete(now, new)
        return differing_fields(old, new)
    if name == _TOKENIZER:
        same = _vocabulary(then) == _vocabulary(now)
        return "" if same else "other tokens"
    return "other bytes" if name.endswith(_WORDS) else ""


def _complete(data: bytes, plain: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a configuration with its defaults, where transformers knows them.

    Releases differ in which fields they write, and in what these are called.
    """
    try:
        return fields(json.dumps(read_config(data).to_dict(), default=str).encode())
    except Exception as exc:  # noqa: BLE001 - absent, or a model that it does not know
        logger.debug("config.json is compared as it is: %s", exc)
        return plain


def _vocabulary(data: bytes) -> Any:  # noqa: ANN401 - JSON
    """Return the tokens of a tokenizer, whose other fields differ among releases."""
    try:
        document = json.loads(data)
        added = {token["content"]: token["id"] for token in document.get("added_tokens") or ()}
        return document["model"].get("vocab"), added
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return data


def _template(files: Mapping[str, bytes]) -> object:
    """Return the template of a chat, wherever a release keeps it."""
    if f"{_TEMPLATE}.jinja" in files:
        return files[f"{_TEMPLATE}.jinja"].decode(errors="replace")
    config = fields(files.get("tokenizer_config.json", b""))
    return config.get(_TEMPLATE) if isinstance(config, dict) else None
