"""Steps on a POSIX file system that ``FileStore`` is made of.

Folders are file descriptors and names are relative to them, so that nothing which is renamed or
replaced by a symbolic link meanwhile leads a step to another place.
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

from deltachain.errors import ConfigError
from deltachain.store.base import is_segment

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY
# Without O_NONBLOCK, opening a FIFO that somebody left here would wait for its writer.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_LEFTOVER: Final = re.compile(r"\.tmp-[0-9a-f]{16}")
_DAY_S: Final = 86_400.0
_NO_FSYNC: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


@contextmanager
def open_folder(root: Path, folders: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """Walk from ``root`` down to a folder, through no symbolic link below the root.

    Raises:
        FileNotFoundError: A folder is absent, and was not made or was removed at once.
        NotADirectoryError: Something else is in the place of a folder.
        OSError: ELOOP for a symbolic link; whatever else the file system says.
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


def open_file(name: str, folder: int) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; the caller closes the descriptor.

    Raises:
        FileNotFoundError: The name is absent, or something that is not a file has it.
        OSError: ELOOP for a symbolic link; whatever else the file system says.
    """
    file = os.open(name, _READ, dir_fd=folder)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
    return file, status


def stat_file(name: str, folder: int) -> os.stat_result:
    """Look a regular file up; raises as ``open_file``."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise _link_refused(name)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
    return status


def is_same_file(name: str, other: str, folder: int) -> bool:
    """Whether two names in a folder are links to one file; not if either is absent."""
    try:
        return os.path.samestat(
            os.stat(name, dir_fd=folder, follow_symlinks=False),
            os.stat(other, dir_fd=folder, follow_symlinks=False),
        )
    except FileNotFoundError:
        return False


def _open_root(root: Path, *, create: bool) -> int:
    """Open the root, which may itself be a symbolic link: whoever named it chose it."""
    try:
        return os.open(root, _FOLDER)
    except FileNotFoundError:
        if not create:
            raise
    except NotADirectoryError as exc:
        raise ConfigError(f"{root} cannot hold a store: it is not a folder") from exc
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir()
        _fsync_path(folder.parent)
    return os.open(root, _FOLDER)


def _link_refused(name: str) -> OSError:
    return OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)


def _enter(name: str, parent: int, *, create: bool) -> int:
    """Open a folder in a folder; make it where it is absent and ``create`` is set."""
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        if not create:
            raise
    except NotADirectoryError as exc:  # what Linux says to a symbolic link as well
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise _link_refused(name) from exc
        raise
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    fsync_folder(parent)
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)


@contextmanager
def temporary_file(data: memoryview, folder: int) -> Iterator[str]:
    """A file on disk with these bytes, under a name that no key has, until the block ends."""
    name = f".tmp-{secrets.token_hex(8)}"
    # Not mkstemp, which lets nobody else read: followers may run as other users. The umask decides.
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
        # Absent after a rename. If it stays, nobody sees it; what counts is how the write ended.
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)


def sweep(folder: int) -> None:
    """Remove the temporary files of writers that were killed more than a day ago.

    Call it after a change to the folder, whose time then tells what time it is on the file system:
    the clock of this machine may be another. A failure to remove them is none: nobody sees them.
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


def scan(folder: int) -> list[tuple[str, os.stat_result]]:
    """Files and folders in a folder that a key can name, in the order of the keys below them."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_segment(entry.name):
                continue
            with suppress(FileNotFoundError):  # deleted since
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    found.append((f"{entry.name}/", entry.name, status))
                elif stat.S_ISREG(status.st_mode):
                    found.append((entry.name, entry.name, status))
    # "a.b" sorts before "a/b": a folder stands where its slash puts it, not where its name ends.
    found.sort(key=lambda item: item[0])
    return [(name, status) for _, name, status in found]


def fsync_folder(folder: int) -> None:
    """Make the entries of a folder durable, where the file system has a notion of it."""
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
