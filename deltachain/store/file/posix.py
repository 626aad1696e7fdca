"""POSIX file operations of ``FileStore``.

Folders are file descriptors and names are relative to them, so that a concurrent rename or
replacement by a symbolic link cannot redirect an operation elsewhere.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from deltachain.errors import ConfigError, StoreUnavailableError
from deltachain.store.base import is_segment

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY
# Without O_NONBLOCK, opening a FIFO in the folder would wait for its writer.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_LEFTOVER: Final = re.compile(r"\.tmp-[0-9a-f]{16}")
_DAY_S: Final = 86_400.0
_NO_FSYNC: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


@contextmanager
def open_folder(root: Path, folders: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """Open a folder below ``root`` without following symbolic links below the root.

    Raises:
        FileNotFoundError: A folder does not exist, or was removed immediately after its creation.
        NotADirectoryError: A path component is not a folder.
        OSError: ELOOP for a symbolic link; any other error of the file system.
        ConfigError: The root is not a folder.
    """
    descriptor = _open_root(root, create=create)
    try:
        for name in folders:
            child = _enter(name, descriptor, create=create)
            os.close(descriptor)
            descriptor = child
        yield descriptor
    finally:
        os.close(descriptor)


class ReadRoot:
    """Root of a store for reading: one that was there and is gone is an outage, not an empty store.

    As on a shared file system that is not mounted any more.

    Args:
        root: Its path.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._was_there = root, False

    @contextmanager
    def folder(self, folders: Sequence[str]) -> Iterator[int]:
        """Open a folder below it as :func:`open_folder`.

        Raises:
            StoreUnavailableError: The root is gone.
        """
        try:
            with open_folder(self._root, folders) as folder:
                self._was_there = True
                yield folder
        except FileNotFoundError as exc:
            if self._was_there and not self._root.exists():
                url = self._root.as_uri()
                raise StoreUnavailableError(
                    f"{url}: the folder was there, and is not any more",
                    url=url,
                    hint="mount its file system again, or put the folder back",
                ) from exc
            raise


def open_file(name: str, folder: int) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; the caller closes the descriptor.

    Raises:
        FileNotFoundError: The name does not exist or is not a regular file.
        OSError: ELOOP for a symbolic link; any other error of the file system.
    """
    file = os.open(name, _READ, dir_fd=folder)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
    return file, status


def stat_file(name: str, folder: int) -> os.stat_result:
    """Return the status of a regular file; raises as ``open_file``."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise _link_refused(name)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
    return status


def is_same_file(name: str, other: str, folder: int) -> bool:
    """Return whether two names in a folder are links to one file; false if either is absent."""
    try:
        return os.path.samestat(
            os.stat(name, dir_fd=folder, follow_symlinks=False),
            os.stat(other, dir_fd=folder, follow_symlinks=False),
        )
    except FileNotFoundError:
        return False


def _open_root(root: Path, *, create: bool) -> int:
    """Open the root, which may itself be a symbolic link, as chosen by the user."""
    try:
        return os.open(root, _FOLDER)
    except FileNotFoundError:
        if not create:
            raise
    except NotADirectoryError as exc:
        raise ConfigError(
            f"{root} cannot hold a store: it is not a folder",
            hint="a chain is in a folder: name that which has, or will have, chain.json",
        ) from exc
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir()
        _fsync_path(folder.parent)
    return os.open(root, _FOLDER)


def _link_refused(name: str) -> OSError:
    return OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)


def _enter(name: str, parent: int, *, create: bool) -> int:
    """Open a subfolder; create it if it is absent and ``create`` is set."""
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        if not create:
            raise
    except NotADirectoryError as exc:  # Linux raises this for a symbolic link as well
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise _link_refused(name) from exc
        raise
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    fsync_folder(parent)
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)


@contextmanager
def temporary_file(data: memoryview, folder: int) -> Iterator[str]:
    """Write the bytes to a temporary file, durably; yield its name, and remove it at the end.

    No key can have this name.
    """
    name = f".tmp-{secrets.token_hex(8)}"
    # Not mkstemp, whose files only their owner can read: followers may run as other users, so the
    # umask decides.
    file = os.open(name, _CREATE, 0o666, dir_fd=folder)
    try:
        try:
            while data:
                data = data[os.write(file, data) :]
            os.fsync(file)
        finally:
            os.close(file)
        yield name
    finally:
        # Absent after a rename. A leftover file is invisible; only the result of the write counts.
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)


def sweep(folder: int) -> None:
    """Remove temporary files of writers that were killed more than a day ago.

    Call this after a change to the folder: its modification time is then the current time of the
    file system, whose clock may differ from this machine's. Failures are ignored, since no reader
    sees these files.
    """
    with suppress(OSError):
        now = os.fstat(folder).st_mtime
        with os.scandir(folder) as entries:
            for entry in entries:
                if _LEFTOVER.fullmatch(entry.name) is None:
                    continue
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and now - status.st_mtime > _DAY_S:
                    os.unlink(entry.name, dir_fd=folder)


def scan(folder: int, prefix: str = "") -> list[str]:
    """List the files and folders of a folder that begin with a prefix, folders with a slash.

    Names that no key can have are left out. The order is that of keys: "a.b" comes before "a/b".
    Returns names only, which take little memory in a folder of a hundred thousand objects.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not (entry.name.startswith(prefix) and is_segment(entry.name)):
                continue
            if entry.is_dir(follow_symlinks=False):
                found.append(f"{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                found.append(entry.name)
    found.sort()
    return found


def fsync_folder(folder: int) -> None:
    """Make the entries of a folder durable, if the file system supports it."""
    try:
        os.fsync(folder)
    except OSError as exc:
        if exc.errno not in _NO_FSYNC:
            raise


def _fsync_path(path: Path) -> None:
    folder = os.open(path, _FOLDER)
    try:
        fsync_folder(folder)
    finally:
        os.close(folder)
