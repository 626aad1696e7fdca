"""What the file systems of fsspec promise: a table, by protocol, and why.

fsspec gives every storage the same methods, not the same guarantees, and does not say which one
gives what. Each line here is what the source of the file system and the documentation of the
storage behind it say. A protocol that has no line is read, and not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """What one file system promises.

    Attributes:
        writes: How an object becomes visible whole: ``put`` where ``pipe_file`` does that by
            itself, ``rename`` where a file must be written under another name and renamed over the
            old one, ``swap`` where a rename refuses a name that is taken, so that the old object is
            removed first and readers may for a moment find none. ``none``: nobody knows how.
        create: Arguments that make ``pipe_file`` fail, by a decision of the storage itself, where
            the object exists; None where nothing does. The default of fsspec looks first and
            writes then, which is not this.
        list_consistent: A listing shows every object whose write returned before it began.
        threads: The file system may be used by several threads at once, or has a loop of its own.
        package: What to install for it, as pip takes it.
    """

    writes: Literal["put", "rename", "swap", "none"] = "none"
    create: Mapping[str, object] | None = None
    list_consistent: bool = False
    threads: bool = True
    package: str = ""


UNKNOWN: Final = Promises(threads=False)
"""Of a protocol that has no line."""

# ifGenerationMatch=0 on single and resumable uploads. Zonal buckets ignore it, and are refused.
_GCS: Final = Promises(
    writes="put", create={"mode": "create"}, list_consistent=True, package="deltachain[gcs]"
)
# If-None-Match: * on Put Blob and Put Block List. Not mode="create": older releases pass it on.
_AZURE: Final = Promises(
    writes="put", create={"overwrite": False}, list_consistent=True, package="deltachain[azure]"
)
# s3fs sends If-None-Match and says that only AWS is known to heed it; s3:// finds out by itself.
_S3: Final = Promises(writes="put", list_consistent=True, package="s3fs")
# Opening with "xb" would claim the name before the bytes are there, and be no whole object.
_LOCAL: Final = Promises(writes="rename", list_consistent=True)
# posix-rename@openssh.com replaces in one step; two clients that look first may both find nothing.
_SFTP: Final = Promises(writes="rename", list_consistent=True, threads=False, package="paramiko")

PROMISES: Final[Mapping[str, Promises]] = {
    "abfs": _AZURE,
    "abfss": _AZURE,
    "az": _AZURE,
    "file": _LOCAL,
    "gcs": _GCS,
    "gs": _GCS,
    # HDFS and Windows shares refuse to rename onto a name that is taken.
    "hdfs": Promises(writes="swap", list_consistent=True, package="pyarrow"),
    "local": _LOCAL,
    # "create" looks into a dict and writes then, with no lock around both.
    "memory": Promises(writes="put", list_consistent=True),
    # Object stores whose file systems have no exclusive create; nothing was read about listings.
    "oci": Promises(writes="put", package="ocifs"),
    "oss": Promises(writes="put", package="ossfs"),
    "s3a": _S3,
    "sftp": _SFTP,
    "smb": Promises(writes="swap", list_consistent=True, threads=False, package="smbprotocol"),
    "ssh": _SFTP,
    "tos": Promises(writes="put", package="tosfs"),
}
"""What is known, by protocol."""

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
"""Protocols that show another file system, through a cache or as one file."""


def promises_of(protocol: str | Sequence[str]) -> Promises:
    """What is known of a file system that goes by one or more names."""
    names = (protocol,) if isinstance(protocol, str) else protocol
    return next((PROMISES[name] for name in names if name in PROMISES), UNKNOWN)
