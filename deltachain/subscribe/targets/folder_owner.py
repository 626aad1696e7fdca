"""The folder that ``pull`` and ``follow`` fill: never one that belongs to somebody else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from deltachain.chain.chain import Chain
from deltachain.checkpoint import ASSET_SUFFIXES, HELD_FILE, INDEX_FILE, write_atomic
from deltachain.errors import ChainMismatchError, ConfigError
from deltachain.format.documents import parse
from deltachain.remote_code import without_remote_code
from deltachain.subscribe import FolderTarget, HeldVersion, Patch
from deltachain.subscribe.targets.folder import HeldFile, explained
from deltachain.types import TensorSpec

_OURS: Final = (HELD_FILE, INDEX_FILE)
"""Files of a folder that no chain may bring along."""


class OwnFolder(FolderTarget):
    """A checkpoint folder that only the chain which filled it may write to."""

    def bind(self, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> None:
        """See :class:`FolderTarget`.

        Raises:
            ConfigError: The folder has weights, and nothing says that they came from a chain.
        """
        with explained(self.folder):
            if self.folder.exists() and not self.folder.is_dir():
                raise ConfigError(f"{self.folder} is not a folder")
            weights = [file.name for file in self.folder.glob("*.safetensors")]
            if weights and not (self.folder / HELD_FILE).is_file():
                raise ConfigError(
                    f"{self.folder} has weights that are not from a chain ({min(weights)})",
                    hint="they may be the only copy; give a folder that is empty or not there yet",
                )
        super().bind(specs, aliases)

    def write(self, patches: Iterable[Patch], held: HeldVersion) -> None:
        """See :class:`FolderTarget`."""
        self.refuse_other(held.chain)
        super().write(patches, held)

    def refuse_other(self, chain: str) -> None:
        """Refuse to put a chain into the folder of another one.

        Raises:
            ChainMismatchError: Another chain fills this folder.
            FormatError: Something does, but what it wrote of itself cannot be read.
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
    """Write the small files that came with the chain where they are absent; the names written.

    A file that is there is left alone: somebody may have edited it.

    Args:
        chain: Brings them.
        folder: Where to.
        trusted: Whether they may name code elsewhere.

    Raises:
        ApplyError: The folder cannot be written to now.
    """
    written = []
    for name, data in chain.assets():
        file = folder / name
        is_small_file = file.suffix in ASSET_SUFFIXES and name not in _OURS
        with explained(folder):
            if is_small_file and not name.startswith(".") and not file.exists():
                url = chain.store.url
                data = without_remote_code(name, data, trusted=trusted, where=url)  # noqa: PLW2901
                write_atomic(file, data)
                written.append(name)
    return written
