"""Room on a disk: taken before the first byte is written, and what is missing, in bytes."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from pathlib import Path
from typing import Final

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a disk without room says: it is full, a quota is, or the file is larger than allowed."""

_CANNOT: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})
"""What a file system says that takes no room ahead of writing, as NFS before 4.2."""


class NoRoomError(OSError):
    """A file does not fit; ``missing`` says by how many bytes."""

    def __init__(self, cause: OSError, file: Path, nbytes: int, free: int) -> None:
        why = os.strerror(cause.errno or errno.ENOSPC)
        super().__init__(cause.errno, f"{why}: {nbytes:,} bytes were needed", str(file))
        self.missing = max(nbytes - free, 1)


def reserve(file: Path, nbytes: int) -> None:
    """Make a file so many bytes long and take the room for all of them, zero where none were.

    What is then written to it, even through a map, finds its place on the disk. Where the file
    system cannot promise that, it must at least say that it has the room; only calls that write
    are safe there, since they fail with an error.

    Raises:
        NoRoomError: There is less room; the file is as long as before, or longer.
        OSError: Whatever else the system says.
    """
    with file.open("r+b", buffering=0) as out:
        there = os.fstat(out.fileno()).st_blocks * 512
        free = _free(os.fstatvfs(out.fileno())) + there
        try:
            _allocate(out.fileno(), nbytes)
        except OSError as exc:
            if exc.errno in FULL:
                raise NoRoomError(exc, file, nbytes, free) from exc
            if exc.errno not in _CANNOT:
                raise
            _refuse(file, nbytes, free)
            if os.fstat(out.fileno()).st_size < nbytes:
                out.truncate(nbytes)


def check_room(folder: Path, nbytes: int) -> None:
    """Ask whether a folder has room for a file, without taking it.

    Raises:
        NoRoomError: It has less.
    """
    _refuse(folder, nbytes, _free(os.statvfs(folder)))


def _refuse(path: Path, nbytes: int, free: int) -> None:
    if 0 < free < nbytes:  # some file systems do not count, and say that nothing is free
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise NoRoomError(full, path, nbytes, free)


def fill_holes(file: Path) -> None:
    """Take the room for all of a file of which a part was never written.

    Raises:
        NoRoomError: There is less room.
        OSError: Whatever else the system says.
    """
    with file.open("rb") as opened:
        nbytes = os.fstat(opened.fileno()).st_size
        has_holes = nbytes and os.lseek(opened.fileno(), 0, os.SEEK_HOLE) < nbytes
    if has_holes:
        reserve(file, nbytes)


def hint_for(error: BaseException, folder: Path) -> str:
    """What to do about a write that failed for the want of something; empty for other reasons."""
    number = getattr(error, "errno", None)
    if number in FULL:
        missing = getattr(error, "missing", None)
        many = "some bytes" if missing is None else f"{missing:,} bytes"
        limit = " (ulimit -f)" if number == errno.EFBIG else ""
        return f"{many} are missing{limit}: free them, or choose a folder with more room"
    return _HINTS.get(number or 0, "").format(folder=folder)


_HINTS: Final = {
    errno.EACCES: "let this user write to {folder}, or choose another folder",
    errno.EPERM: "let this user write to {folder}, or choose another folder",
    errno.EROFS: "{folder} is mounted read-only: mount it for writing, or choose another folder",
    errno.EMFILE: "this process has no file descriptor left: raise ulimit -n",
    errno.ENFILE: "this machine has no file descriptor left: raise fs.file-max",
}


def _free(status: os.statvfs_result) -> int:
    """Bytes that this process may still write into one file of a file system."""
    blocks = status.f_bfree if os.geteuid() == 0 else status.f_bavail
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    free = blocks * status.f_frsize
    return free if limit == resource.RLIM_INFINITY else min(free, limit)


# Not os.posix_fallocate: where a file system has no such call, the C library writes into every
# block, which takes hours for a large model on a file server.
_FALLOCATE: Final = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)


def _allocate(descriptor: int, nbytes: int) -> None:
    if nbytes == 0:
        return
    if _FALLOCATE is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while _FALLOCATE(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
