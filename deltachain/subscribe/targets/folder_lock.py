"""Lock of a followed folder against other processes."""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

from deltachain.errors import ConfigError

LOCK_FILE: Final = ".deltachain-lock"


class FolderLock:
    """Lock of one folder, for the lifetime of this object.

    Args:
        folder: The folder; created with the lock.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / LOCK_FILE
        self._descriptor = -1
        self._unlock: weakref.finalize[..., FolderLock] | None = None
        self._made = False

    def take(self) -> None:
        """Lock the folder, also anew after it or its lock file was removed; idempotent.

        Raises:
            ConfigError: Another process writes to the folder, or a file is in its place.
            OSError: The folder cannot be created or written to.
        """
        self._refuse_file()
        while not self._is_held():
            self._try()

    def release(self) -> None:
        """Unlock the folder; idempotent. A folder that was never filled is removed again."""
        if self._unlock is None or not self._unlock.alive:
            return
        with suppress(OSError):
            if [file.name for file in self._folder.iterdir()] == [LOCK_FILE]:
                self._file.unlink()
                if self._made:
                    self._folder.rmdir()
        self._unlock()

    def _is_held(self) -> bool:
        if self._unlock is None or not self._unlock.alive:
            return False
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._descriptor), self._file.stat())
        return False

    def _refuse_file(self) -> None:
        folder = self._folder
        nearest = next((one for one in (folder, *folder.parents) if one.exists()), None)
        if nearest is not None and not nearest.is_dir():
            raise ConfigError(
                f"{nearest} is not a folder",
                hint="name a new folder, or one that this chain fills",
            )

    def _try(self) -> None:
        """Lock the file; a process that closes an empty folder may remove it meanwhile."""
        if self._unlock is not None:
            self._unlock()
        self._made |= not self._folder.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise ConfigError(
                f"{file} is a link or a device, not a file",
                hint="see who writes to this folder, and remove it",
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(file, flags, 0o666)
        self._unlock = weakref.finalize(self, os.close, self._descriptor)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as exc:
            self._unlock()
            raise ConfigError(
                f"another process writes to {self._folder}",
                hint="give every follower a folder of its own",
            ) from exc
