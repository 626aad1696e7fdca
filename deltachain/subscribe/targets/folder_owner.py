"""Folder target of ``pull`` and ``follow``, which refuses folders not filled by its chain."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from typing_extensions import override

from deltachain.chain.chain import Chain
from deltachain.chain.checks import asset_paths
from deltachain.chain.identity import chain_around
from deltachain.checkpoint import ADAPTER_CONFIG, HELD_FILE, is_asset, weights_file, write_atomic
from deltachain.config_fields import LIBRARY, differing_fields, fields
from deltachain.errors import ChainMismatchError, ConfigError
from deltachain.format.documents import parse
from deltachain.remote_code import bare, without_remote_code
from deltachain.subscribe import FolderTarget, HeldVersion, Patch
from deltachain.subscribe.targets.folder import HeldFile, explained
from deltachain.types import TensorSpec
from deltachain.weight_files import ADAPTER_FILE, WEIGHTS_FILE

logger = logging.getLogger(__name__)


class OwnFolder(FolderTarget):
    """A checkpoint folder that only its own chain may write to."""

    def bind(self, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> None:
        """Match tensors by name in a folder filled by a chain; see :class:`FolderTarget`.

        Raises:
            ConfigError: The folder has weights without any record of a chain, or is where a chain
                is stored.
        """
        with explained(self.folder):
            within = chain_around(self.folder)
            if within is not None:
                raise ConfigError(
                    f"{within} has a chain, which only its publisher may write to",
                    hint="name a folder beside the chain",
                )
            weights = [file.name for file in self.folder.glob("*.safetensors")]
            if weights and not (self.folder / HELD_FILE).is_file():
                raise ConfigError(
                    f"{self.folder} has weights that are not from a chain ({min(weights)})",
                    hint="they may be the only copy; give a folder that is empty or not there yet",
                )
        super().bind(specs, aliases)

    @override
    def write(self, patches: Iterable[Patch], held: HeldVersion) -> None:
        self.refuse_other(held.chain)
        super().write(patches, held)

    def refuse_other(self, chain: str) -> None:
        """Refuse a chain if the folder is another chain's.

        Raises:
            ChainMismatchError: Another chain fills this folder.
            FormatError: The folder's record of its chain cannot be read.
        """
        file = self.folder / HELD_FILE
        with explained(self.folder):
            if not file.is_file():
                return
            remembered = parse(file.read_bytes(), HeldFile, key=str(file))
        if remembered.chain != chain:
            raise ChainMismatchError(
                f"{self.folder} holds a version of chain {remembered.chain}, "
                f"the chain at this URL is {chain}",
                hint="give another folder",
            )


def write_assets(chain: Chain, folder: Path, *, trusted: bool = False) -> list[str]:
    """Write the assets of a chain that the folder does not have; return the names written.

    Existing files are left alone, since a user may have edited them; a warning names files whose
    content differs. The configuration of an adapter is written beside one only: loaders that see it
    load the base it names instead of the weights.

    Args:
        chain: The chain.
        folder: Folder to write to.
        trusted: Whether the assets may refer to remote code.

    Raises:
        ApplyError: The folder cannot be written now.
    """
    written, kept = [], list[str]()
    refused = _refused(chain, folder)
    for name, data in chain.assets():
        file = folder / name
        if not is_asset(name) or name.lower() in refused:
            continue
        with explained(folder):
            if _is_elsewhere(file, folder):
                continue
            if file.exists():
                kept += _difference(name, file, data)
                continue
            asset = without_remote_code(name, data, trusted=trusted, where=chain.store.url)
            if asset is not None:
                _write(file, asset, folder)
                written.append(name)
    if kept:
        _say_kept(folder, ", ".join(sorted(kept)))
    return written


def _refused(chain: Chain, folder: Path) -> set[str]:
    """Return the names that loaders of the folder must not find."""
    paths = asset_paths(chain.identity)
    if weights_file((name for name, *_ in chain.table.tensors), paths) != ADAPTER_FILE:
        return {ADAPTER_CONFIG}
    if ADAPTER_CONFIG in paths and (folder / WEIGHTS_FILE).is_file():  # of an earlier release
        logger.warning(
            "%s: %s holds the adapter, and PEFT does not read that name: pull into a new folder",
            folder,
            WEIGHTS_FILE,
        )
        return {ADAPTER_CONFIG}
    return set()


def _write(file: Path, data: bytes, folder: Path) -> None:
    if file.parent != folder:
        file.parent.mkdir(exist_ok=True)
    write_atomic(file, data)


def _difference(name: str, file: Path, data: bytes) -> list[str]:
    """Name a file with other content than the chain's, and the fields that differ in JSON."""
    own = file.read_bytes() if file.is_file() else data
    if own == data:
        return []
    if file.suffix != ".json":
        return [name]
    mine, theirs = fields(bare(own)), fields(bare(data))
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        return [name] if mine is None or mine != theirs else []
    found = [differing_fields(mine, theirs)]
    if mine.get(LIBRARY) != theirs.get(LIBRARY):
        found.append(repr(LIBRARY))  # which differing_fields leaves to a check of its own
    named = ", ".join(filter(None, found))
    return [f"{name} ({named})"] if named else []


@cache
def _say_kept(folder: Path, names: str) -> None:
    logger.warning(
        "%s has files that differ from the chain's, and are kept: %s; remove them to get the "
        "chain's",
        folder,
        names,
    )


def _is_elsewhere(file: Path, folder: Path) -> bool:
    """Return whether a file lies in a folder that a link leads out to."""
    return file.parent != folder and file.parent.is_symlink()
