"""Objects as files below one folder, on a local disk or a shared file system such as NFS.

A write goes to a hidden temporary file in the folder of its object and becomes visible by one
``rename`` or ``link``, so that a killed writer leaves no visible object. Symbolic links below the
root are refused, so that a key never leads out of it.
"""

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import numpy as np

from deltachain import errors
from deltachain.store import base
from deltachain.threads import Pool, cores
from deltachain.types import Buffer

# Folders are file descriptors and names are relative to them, so that a concurrent rename or
# replacement by a symbolic link cannot redirect an operation elsewhere.


_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY
# Without O_NONBLOCK, opening a FIFO in the folder would wait for its writer.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_LEFTOVER: Final = re.compile(r"\.tmp-[0-9a-f]{16}")
_DAY_S: Final = 86_400.0
_NO_FSYNC: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


@contextmanager
def _open_folder(root: Path, folders: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """Open a folder below ``root`` without following symbolic links below the root."""
    descriptor = _open_root(root, create=create)
    try:
        for name in folders:
            child = _enter(name, descriptor, create=create)
            os.close(descriptor)
            descriptor = child
        yield descriptor
    finally:
        os.close(descriptor)


def _open_file(name: str, folder: int) -> tuple[int, os.stat_result]:
    file = os.open(name, _READ, dir_fd=folder)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
    return file, status


def _stat_file(name: str, folder: int) -> os.stat_result:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise _link_refused(name)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
    return status


def _is_same_file(name: str, other: str, folder: int) -> bool:
    try:
        found = [os.stat(one, dir_fd=folder, follow_symlinks=False) for one in (name, other)]
    except FileNotFoundError:
        return False
    return os.path.samestat(*found)


def _open_root(root: Path, *, create: bool) -> int:
    try:
        return os.open(root, _FOLDER)
    except FileNotFoundError:
        if not create:
            raise
    except NotADirectoryError as exc:
        raise errors.ConfigError(
            f"{root} cannot hold a store: it is not a folder",
            hint="a chain is in a folder: name that which has, or will have, chain.json",
        ) from exc
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir()
        with _open_folder(folder.parent, ()) as parent:
            _fsync_folder(parent)
    return os.open(root, _FOLDER)


def _link_refused(name: str) -> OSError:
    return OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)


def _enter(name: str, parent: int, *, create: bool) -> int:
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
    _fsync_folder(parent)
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)


@contextmanager
def _temporary_file(data: memoryview, folder: int) -> Iterator[str]:
    """Write a temporary file durably, under a name that no key can have; remove it at the end."""
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


def _sweep(folder: int) -> None:
    """Remove temporary files of writers that were killed more than a day ago.

    The folder has just been changed: its modification time is the current time of the file system,
    whose clock may differ from this machine's. Failures are ignored: no reader sees these files.
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


def _scan(folder: int, prefix: str = "") -> list[tuple[str, int, float]]:
    """List name, size and time of files and folders that begin with a prefix, in the order of keys.

    Names of folders end in a slash: "a.b" comes before "a/b".
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not (entry.name.startswith(prefix) and base.is_segment(entry.name)):
                continue
            if entry.is_dir(follow_symlinks=False):
                found.append((f"{entry.name}/", 0, 0.0))
            elif entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    status = entry.stat(follow_symlinks=False)
                    found.append((entry.name, status.st_size, status.st_mtime))
    found.sort()
    return found


def _fsync_folder(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as exc:
        if exc.errno not in _NO_FSYNC:
            raise


_T = TypeVar("_T")

_MAX_PRUNE_RACES: Final = 32  # attempts of a write whose folder others remove; each needs a delete
_PIECE: Final = 1 << 25  # bytes of a large object that a thread reads at a time

_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP})
_HINT_REFUSED: Final = "check who owns the folder, its permissions, and how it is mounted"
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_HINT_VANISHES: Final = "something keeps deleting it; stop that, then try again"
_HINT_CREATE: Final = "name a folder of a file system in which folders can be created"
_HINTS: Final = {
    errno.EACCES: _HINT_REFUSED,
    errno.EPERM: _HINT_REFUSED,
    errno.EROFS: _HINT_REFUSED,
    errno.ELOOP: "symbolic links inside a store are not followed; move the files instead",
    errno.ENOSPC: "the disk is full: free some space, then try again",
    errno.EDQUOT: "the disk quota is used up: free some space, then try again",
    errno.EFBIG: "the object is larger than a file may be here: see ulimit -f",
    errno.EMFILE: "this process has too many open files: see ulimit -n",
    errno.EIO: "the disk or the file server failed: see the system log",
    errno.ESTALE: "the file server replaced the file meanwhile; try again",
}


@base.guarded
class FileStore(base.SimpleStore):
    """Objects as files below ``root``, shared by all processes and machines with access to it.

    The first write creates the root. A killed writer leaves a file ``.tmp-*`` behind that no method
    shows. Once it is a day old, a delete in the same folder removes it.

    On NFS, other machines see a new object, also in listings, with a delay of up to the attribute
    cache time of their mount (``actimeo``). ``put_if_absent`` is decided by the server, so it has
    exactly one winner there too.
    """

    capabilities: Final = base.Capabilities(
        conditional_put=True, list_consistent=True, cheap_ranges=True
    )

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root).absolute()
        self._was_there = False

    @property
    def root(self) -> Path:
        """Folder of the objects."""
        return self._root

    @property
    def url(self) -> str:
        """URL of the store: ``file://`` and the absolute path of the root."""
        return self._root.as_uri()

    def put(self, key: str, data: Buffer) -> str:
        with self._errors_named(base.check_key(key)):
            self._write(key, data, if_absent=False)
        return ""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Write an object if the key has none; see ``Store``.

        Raises:
            ConfigError: The file system has no hard links. A check followed by a write would let
                two publishers win, so it is not done.
        """
        with self._errors_named(base.check_key(key)):
            self._write(key, data, if_absent=True)

    def find(self, key: str) -> base.ObjectInfo | None:
        folders, leaf = _split(base.check_key(key))
        with self._errors_named(key):
            try:
                with self._folder(folders) as folder:
                    status = _stat_file(leaf, folder)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return base.ObjectInfo(key=key, nbytes=status.st_size, modified=status.st_mtime)

    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        return self._walk(*_split(base.check_prefix(prefix)))

    def clock(self) -> float:
        """Return the time by this machine's clock, which that of a file server may differ from."""
        return time.time()

    def delete(self, key: str) -> None:
        """Delete an object and the folders that become empty; see ``Store``.

        A deleted object may reappear after a power failure.
        """
        folders, leaf = _split(base.check_key(key))
        with self._errors_named(key):
            try:
                with _open_folder(self._root, folders) as folder:
                    os.unlink(leaf, dir_fd=folder)
                    _sweep(folder)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return
            self._prune(folders)

    def _write(self, key: str, data: Buffer, *, if_absent: bool) -> None:
        view = base.bytes_view(data)
        folders, leaf = _split(key)
        for _ in range(_MAX_PRUNE_RACES):
            try:
                with _open_folder(self._root, folders, create=True) as folder:
                    with _temporary_file(view, folder) as temporary:
                        if if_absent:
                            self._link(key, leaf, temporary, folder)
                        else:
                            os.replace(temporary, leaf, src_dir_fd=folder, dst_dir_fd=folder)
                    _fsync_folder(folder)
            except FileNotFoundError:
                continue  # a delete removed the empty folder after it was opened
            except (NotADirectoryError, IsADirectoryError) as exc:
                raise errors.ConfigError(
                    f"key {key!r} in {self.url}: {exc.filename or leaf!r} is a folder of other "
                    "objects, or an object in the place of a folder"
                ) from exc
            return
        said, hint = (
            (f"the folder of {key!r} kept vanishing while it was written to", _HINT_VANISHES)
            if self._root.exists()
            else ("the folder cannot be created", _HINT_CREATE)
        )
        raise errors.StoreUnavailableError(f"{self.url}: {said}", key=key, url=self.url, hint=hint)

    def _link(self, key: str, leaf: str, temporary: str, folder: int) -> None:
        try:
            os.link(temporary, leaf, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as exc:
            # A file server may create the link and lose the reply; the repeated request then finds
            # our own link. The link count cannot tell: a backup may have linked the file too, and
            # an NFS client looks up the new name afresh but may have the old count cached.
            if _is_same_file(temporary, leaf, folder):
                return
            if exc.errno == errno.EEXIST:
                raise base.already_exists(key, self.url) from exc
            if exc.errno in _NO_LINKS:
                raise errors.ConfigError(
                    f"the file system of {self.url} has no hard links, which putting an object "
                    "only if it is absent needs",
                    hint="keep the chain on a local Linux file system, on NFS, or in a bucket",
                ) from exc
            raise

    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        if nbytes <= _PIECE:
            return super().read(key, nbytes=nbytes, pin=pin)
        return self._again(base.check_key(key), partial(self._read_large, nbytes=nbytes))

    def _read(self, key: str, choose: base.Choose) -> bytes:
        return self._again(key, partial(self._read_once, choose=choose))

    def _again(self, key: str, read: Callable[[str], _T]) -> _T:
        """Read an object, once more if a file server replaced it between two calls."""
        with self._errors_named(key):
            try:
                return read(key)
            except OSError as exc:
                if exc.errno != errno.ESTALE:
                    raise
            return read(key)

    def _read_once(self, key: str, choose: base.Choose) -> bytes:
        with self._open_object(key) as (file, nbytes):
            return self._pread(key, file, *choose(nbytes))

    def _read_large(self, key: str, nbytes: int) -> memoryview:
        """Read a whole object in threads into one array, for which numpy asks for large pages."""
        with self._open_object(key) as (file, actual):
            base.check_nbytes(key, self.url, expected=nbytes, actual=actual)
            view = np.empty(nbytes, np.uint8).data

            def fill(at: int) -> None:
                end = min(at + _PIECE, nbytes)
                while at < end:
                    count = os.preadv(file, [view[at:end]], at)
                    if not count:
                        raise base.too_short(key, self.url, nbytes=at, end=end)
                    at += count

            with Pool(cores()) as pool:
                for _ in pool.map(fill, range(0, nbytes, _PIECE)):
                    pass
        return view.toreadonly()

    @contextmanager
    def _folder(self, folders: Sequence[str]) -> Iterator[int]:
        """Open a folder; a root that is gone is an outage: a file system that is not mounted."""
        try:
            with _open_folder(self._root, folders) as folder:
                self._was_there = True
                yield folder
        except FileNotFoundError as exc:
            if self._was_there and not self._root.exists():
                why = "the folder was there, and is not any more"
                hint = "mount its file system again, or put the folder back"
                raise base.unavailable("", self.url, why, hint) from exc
            raise

    @contextmanager
    def _open_object(self, key: str) -> Iterator[tuple[int, int]]:
        folders, leaf = _split(key)
        try:
            with self._folder(folders) as folder:
                file, status = _open_file(leaf, folder)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise base.not_found(key, self.url) from exc
        try:
            yield file, status.st_size
        finally:
            os.close(file)

    def _pread(self, key: str, file: int, start: int, length: int) -> bytes:
        """Read ``length`` bytes, in several calls if needed: one call returns 2 GiB at most."""
        parts: list[bytes] = []
        end = start + length
        while start < end:
            part = os.pread(file, end - start, start)
            if not part:
                raise base.too_short(key, self.url, nbytes=start, end=end)
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _walk(self, folders: Sequence[str], prefix: str) -> Iterator[base.ObjectInfo]:
        with self._errors_named("/".join(folders)):
            try:
                with self._folder(folders) as folder:
                    found = _scan(folder, prefix)
            except (FileNotFoundError, NotADirectoryError):
                return
        for name, nbytes, modified in found:
            if name.endswith("/"):
                yield from self._walk((*folders, name[:-1]), "")
            else:
                key = "/".join((*folders, name))
                yield base.ObjectInfo(key=key, nbytes=nbytes, modified=modified)

    def _prune(self, folders: Sequence[str]) -> None:
        # A failure means that a folder is in use or cannot be removed; an empty folder is harmless.
        with suppress(OSError):
            for depth in range(len(folders) - 1, -1, -1):
                with _open_folder(self._root, folders[:depth]) as parent:
                    os.rmdir(folders[depth], dir_fd=parent)

    @contextmanager
    def _errors_named(self, key: str) -> Iterator[None]:
        try:
            yield
        except errors.DeltaChainError:  # some of them are an OSError too
            raise
        except OSError as exc:
            message = f"object {key!r} in {self.url}: {exc.strerror or exc}"
            kind = (
                errors.StorePermissionError
                if exc.errno in _REFUSED
                else errors.StoreUnavailableError
            )
            hint = _HINTS.get(exc.errno or 0, "")
            raise kind(message, key=key, url=self.url, hint=hint) from exc


def open_file_store(url: str, options: Mapping[str, Any], *, writer: bool) -> FileStore:  # noqa: ARG001
    parts = base.split_url(url, options)
    if parts.netloc not in ("", "localhost") or parts.path in ("", "/"):
        raise errors.ConfigError(
            "file:// store URLs name a folder of this machine",
            hint="three slashes: file:///absolute/folder",
        )
    path = unquote(parts.path)
    if "\0" in path:
        raise errors.ConfigError("file:// store URLs cannot hold a NUL")
    return FileStore(path)


def _split(key: str) -> tuple[tuple[str, ...], str]:
    *folders, leaf = key.split("/")
    return tuple(folders), leaf
