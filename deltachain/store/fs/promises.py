"""Guarantees of the file systems of fsspec: a table by protocol, with reasons.

fsspec gives every storage the same methods, but not the same guarantees, and does not declare them.
Each row follows the source of the file system and the documentation of its storage. A protocol
without a row can be read but not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """Guarantees of one file system."""

    # Method that makes an object visible whole: put if pipe_file does so by itself,
    # rename if a file must be written under another name and renamed over the old one, swap
    # if a rename refuses an existing name, so that the old object is removed first and readers may
    # find none for a moment, none if no method is known.
    writes: Literal["put", "rename", "swap", "none"] = "none"
    # Arguments that make pipe_file fail if the object exists, by a decision of the storage
    # itself; None if there are none. The default of fsspec checks first and then writes, which does
    # not count.
    create: Mapping[str, object] | None = None
    # Whether a listing shows every object whose write returned before it began.
    list_consistent: bool = False
    # Whether several threads may use the file system at once, or it has its own loop.
    threads: bool = True
    package: str = ""  # package to install for it, as pip takes it


UNKNOWN: Final = Promises(threads=False)  # guarantees of a protocol without a row

# ifGenerationMatch=0 on single and resumable uploads. Zonal buckets ignore it, and are refused.
_GCS: Final = Promises(
    writes="put", create={"mode": "create"}, list_consistent=True, package="deltachain[gcs]"
)
# If-None-Match: * on Put Blob and Put Block List. Not mode="create": old releases pass it through.
_AZURE: Final = Promises(
    writes="put", create={"overwrite": False}, list_consistent=True, package="deltachain[azure]"
)
# s3fs sends If-None-Match, documented as known to work on AWS only; s3:// tests the server itself.
_S3: Final = Promises(writes="put", list_consistent=True, package="s3fs")
# Opening with "xb" would create the name before its bytes: not a whole object.
_LOCAL: Final = Promises(writes="rename", list_consistent=True)
# posix-rename@openssh.com replaces atomically; two clients that check first may both find nothing.
_SFTP: Final = Promises(writes="rename", list_consistent=True, threads=False, package="paramiko")

PROMISES: Final[Mapping[str, Promises]] = {
    "abfs": _AZURE,
    "abfss": _AZURE,
    "az": _AZURE,
    "file": _LOCAL,
    "gcs": _GCS,
    "gs": _GCS,
    # HDFS and Windows shares refuse to rename onto an existing name.
    "hdfs": Promises(writes="swap", list_consistent=True, package="pyarrow"),
    "local": _LOCAL,
    # "create" checks a dict and then writes, without a lock around both.
    "memory": Promises(writes="put", list_consistent=True),
    # Object stores whose file systems have no exclusive create; listing guarantees are unknown.
    "oci": Promises(writes="put", package="ocifs"),
    "oss": Promises(writes="put", package="ossfs"),
    "s3a": _S3,
    "sftp": _SFTP,
    "smb": Promises(writes="swap", list_consistent=True, threads=False, package="smbprotocol"),
    "ssh": _SFTP,
    "tos": Promises(writes="put", package="tosfs"),
}
"""Known guarantees, by protocol."""

WRAPPERS: Final = frozenset(
    {
        "async_wrapper",
        "asyncwrapper",
        "blockcache",
        "cached",
        "dask",
        "data",
        "dir",
        "filecache",
        "generic",
        "libarchive",
        "reference",
        "simplecache",
        "tar",
        "zip",
    }
)
"""Protocols that wrap another file system, through a cache or as one file."""


def promises_of(protocol: str | Sequence[str]) -> Promises:
    """Return the known guarantees of a file system with one or more protocol names."""
    names = (protocol,) if isinstance(protocol, str) else protocol
    return next((PROMISES[name] for name in names if name in PROMISES), UNKNOWN)
