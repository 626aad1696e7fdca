"""Disk space: reserved before the first write; errors give the missing bytes."""

import ctypes
import errno
import os
import resource
from pathlib import Path
from typing import Final

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_CANNOT: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})
"""Errors of file systems without preallocation, such as NFS before 4.2."""


class NoRoomError(OSError):
    def __init__(self, cause: OSError, file: Path, nbytes: int, free: int) -> None:
        why = os.strerror(cause.errno or errno.ENOSPC)
        super().__init__(cause.errno, f"{why}: {nbytes:,} bytes were needed", str(file))
        self.missing = max(nbytes - free, 1)


def reserve(file: Path, nbytes: int, start: int = 0) -> None:
    """Allocate blocks of a file, zeros at its end, so that writes of ``nbytes`` there find space.

    Without preallocation (old NFS) only free space is checked: use ``pwrite``, which can fail.
    """
    with file.open("r+b", buffering=0) as out:
        there = 0 if start else os.fstat(out.fileno()).st_blocks * 512
        free = _free(os.fstatvfs(out.fileno())) + there
        try:
            _allocate(out.fileno(), start, nbytes)
        except OSError as exc:
            if exc.errno in FULL:
                raise NoRoomError(exc, file, nbytes, free) from exc
            if exc.errno not in _CANNOT:
                raise
            _refuse(file, nbytes, free)
            if os.fstat(out.fileno()).st_size < start + nbytes:
                out.truncate(start + nbytes)


def check_room(folder: Path, nbytes: int) -> None:
    _refuse(folder, nbytes, _free(os.statvfs(folder)))


def _refuse(path: Path, nbytes: int, free: int) -> None:
    if 0 < free < nbytes:  # file systems that do not count report 0 free bytes
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise NoRoomError(full, path, nbytes, free)


def fill_holes(file: Path) -> None:
    with file.open("rb") as opened:
        nbytes = os.fstat(opened.fileno()).st_size
        has_holes = nbytes and os.lseek(opened.fileno(), 0, os.SEEK_HOLE) < nbytes
    if has_holes:
        reserve(file, nbytes)


def hint_for(error: BaseException, folder: Path) -> str:
    """Return a hint for a write that failed for lack of a resource or permission, else empty."""
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
    blocks = status.f_bfree if os.geteuid() == 0 else status.f_bavail
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    free = blocks * status.f_frsize
    return free if limit == resource.RLIM_INFINITY else min(free, limit)


# Not os.posix_fallocate: on file systems without fallocate, the C library emulates it by writing
# into every block, which takes hours for a large model on a file server.
_FALLOCATE: Final = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)


def _allocate(descriptor: int, start: int, nbytes: int) -> None:
    if nbytes == 0:
        return
    if _FALLOCATE is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while _FALLOCATE(descriptor, 0, ctypes.c_int64(start), ctypes.c_int64(nbytes)):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
