"""Objects in any storage of fsspec: Google and Azure buckets, SFTP, Windows shares and others.

fsspec does not declare a storage's guarantees, so they are looked up by protocol; see ``PROMISES``.
Only guarantees of the storage itself count: if two writers race for a key, a check followed by a
write lets both win.
"""

import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from socket import gaierror
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar
from urllib.parse import urlsplit

from deltachain import errors
from deltachain.redact import redacted_url
from deltachain.store import base
from deltachain.store.registry import schemes
from deltachain.types import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """Guarantees of one file system; of unknown ones the first is ``none``."""

    # What makes an object visible whole: put if pipe_file does; rename if a file under another name
    # must be renamed over the old one; swap if a rename refuses an existing name, so that the old
    # object is removed first and readers may find none for a moment.
    writes: Literal["put", "rename", "swap", "none"] = "none"
    # Arguments that make pipe_file fail if the object exists, decided by the storage itself.
    create: Mapping[str, object] | None = None
    list_consistent: bool = False  # see Capabilities
    threads: bool = True  # whether several may use the file system at once, or it has its own loop
    package: str = ""  # package to install for it, as pip takes it


UNKNOWN: Final = Promises(threads=False)  # of a protocol without a row: read, but not written

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

# Protocols that show another file system, as a cache or one file does.
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


def promises_of(protocol: str | Sequence[str]) -> Promises:
    names = (protocol,) if isinstance(protocol, str) else protocol
    return next((PROMISES[name] for name in names if name in PROMISES), UNKNOWN)


_FOREIGN: Final = (
    ("aiohttp", "ClientError"),
    ("azure.core.exceptions", "AzureError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("gcsfs.retry", "ChecksumError"),
    ("gcsfs.retry", "HttpError"),
    ("google.api_core.exceptions", "GoogleAPIError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("paramiko.ssh_exception", "SSHException"),
    ("smbprotocol.exceptions", "SMBException"),
)
_REFUSALS: Final = frozenset({"AuthenticationException", "DefaultCredentialsError"})
_BUSY: Final = frozenset({408, 425, 429})
_NO_HOST: Final = "there is no such host, or no name server: check the host in the URL"
_CODES: Final = ("status_code", "status", "code")
_TIMES: Final = ("mtime", "last_modified", "LastModified", "updated", "modified", "created")
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/@\s]*@|\?[^\s'\"]*")


def failures() -> tuple[type[BaseException], ...]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in _FOREIGN)
    return (OSError, *(kind for kind in found if kind is not None))


def store_error(error: BaseException, key: str, url: str) -> errors.StoreError:
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    words = _CREDENTIALS.sub("", str(words).partition("\n")[0])
    message = f"object {key!r} in {url}: {words}" if key else f"{url}: {words}"
    if _is_refusal(error):
        return errors.StorePermissionError(message, key=key, url=url)
    hint = _NO_HOST if isinstance(getattr(error, "os_error", error), gaierror) else ""
    return errors.StoreUnavailableError(message, key=key, url=url, hint=hint)


def unanswered(absence: BaseException) -> BaseException | None:
    """Return the failure that a file system took for an absent object; ``None`` if it is absent.

    fsspec's HTTP raises ``FileNotFoundError`` for whatever fails. 403 is believed.
    """
    cause, kinds = absence.__cause__, failures()
    while cause is not None and (
        isinstance(cause, FileNotFoundError) or not isinstance(cause, kinds)
    ):
        cause = cause.__cause__
    status = getattr(cause, "status", None)
    is_answer = isinstance(status, int) and 400 <= status < 500 and status not in _BUSY
    return None if is_answer else cause


def _is_refusal(error: BaseException) -> bool:
    codes = {str(getattr(error, name, "")) for name in _CODES}
    return (
        isinstance(error, PermissionError)
        or type(error).__name__ in _REFUSALS
        or not codes.isdisjoint({"401", "403"})
        or str(error).startswith("Forbidden: ")  # the only sign of a 403 from gcsfs
    )


def modified(info: Mapping[str, Any]) -> float | None:
    value = next((info[name] for name in _TIMES if info.get(name) is not None), None)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return float(value) if isinstance(value, int | float) else None


if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_P = ParamSpec("_P")
_T = TypeVar("_T")

_PIECE: Final = 16 << 20  # size of one ranged read of a large object, in bytes
_TOGETHER: Final = 8  # concurrent ranged reads; their bytes are copied before the next

_NO_OBJECT: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_IN_THE_WAY: Final = (FileExistsError, NotADirectoryError, IsADirectoryError)


@base.guarded
class FsspecStore(base.SimpleStore):
    """Objects below one path of an fsspec file system.

    Its guarantees depend on the protocol. If no atomic write is known for a protocol, the store can
    be read but not written. Durability of ``put`` depends on the storage: object stores are durable
    once they answer, others are not synced. Temporary files are hidden ``.tmp-*`` files; those of a
    killed writer stay. File systems of object stores repeat failed requests, others do not.

    Listing caches are turned off in the file system object: do not share it with code that needs
    them.
    """

    def __init__(
        self,
        filesystem: "AbstractFileSystem",
        root: str,
        *,
        promises: Promises | None = None,
        url: str = "",
    ) -> None:
        self._fs = filesystem
        self._fs.dircache.use_listings_cache = False
        self._root = str(filesystem._strip_protocol(root)).rstrip("/")
        if not self._root.strip("/"):
            raise errors.ConfigError("an fsspec store needs a bucket, or a path below the root")
        self._promises = promises_of(filesystem.protocol) if promises is None else promises
        self._url = url or filesystem.unstrip_protocol(self._root)
        self._requests = 0
        self._counting = threading.Lock()
        self._turn: AbstractContextManager[object] = (
            nullcontext() if self._promises.threads else threading.RLock()
        )
        self._failures = failures()

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> base.Capabilities:
        return base.Capabilities(
            conditional_put=self._promises.create is not None,
            list_consistent=self._promises.list_consistent,
        )

    @property
    def requests(self) -> int:
        """Number of calls to the file system, which does not report the requests of a call."""
        return self._requests

    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        if nbytes <= _PIECE or getattr(self._fs, "local_file", False):
            return super().read(key, nbytes=nbytes, pin=pin)
        path = self._path(key)
        with self._reading(key):
            base.check_nbytes(key, self.url, expected=nbytes, actual=self._nbytes(key, path))
            return self._read_in_pieces(key, path, nbytes)

    def _read(self, key: str, choose: base.Choose) -> bytes:
        path = self._path(key)
        with self._reading(key):
            nbytes = self._nbytes(key, path)
            start, length = choose(nbytes)
            end, is_whole = start + length, length == nbytes
            part = {} if is_whole else {"start": start, "end": end}
            data = bytes(self._call(self._fs.cat_file, path, **part)) if length else b""
        if is_whole:
            start, length = choose(len(data))  # of another object, if it was replaced meanwhile
            return data[start : start + length]
        if len(data) != length:
            raise base.too_short(key, self.url, nbytes=start + len(data), end=end)
        return data

    def put(self, key: str, data: Buffer) -> str:
        self._write(self._path(key), key, _as_bytes(data))
        return ""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        path = self._path(key)
        create = self._promises.create
        if create is None:
            if self.find(key) is not None:
                raise base.already_exists(key, self.url)
            self._write(path, key, _as_bytes(data))
            return
        self._check_writable(key)
        with self._writing(key):
            try:
                self._call(self._fs.pipe_file, path, _as_bytes(data), **create)
            except FileExistsError as exc:
                raise base.already_exists(key, self.url) from exc

    def find(self, key: str) -> base.ObjectInfo | None:
        path = self._path(key)
        try:
            with self._reading(key):
                return self._described(key, self._info(path))
        except errors.ObjectNotFoundError:
            return None

    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        folder = base.check_prefix(prefix).rpartition("/")[0]
        # By default, a walk silently omits folders that it cannot list.
        walks = {} if self._promises.writes == "put" else {"on_error": _raise_unless_gone}
        try:
            with self._reading(folder):
                self._fs.invalidate_cache()
                path = f"{self._root}/{folder}" if folder else self._root
                found = self._call(self._fs.find, path, detail=True, **walks)
        except errors.ObjectNotFoundError:
            found = {}
        start = len(self._root.strip("/")) + 1
        entries = found.items() if isinstance(found, Mapping) else ()  # a list names the one file
        keyed = {str(name).strip("/")[start:]: info for name, info in entries}
        return iter(
            [
                self._described(key, keyed[key])
                for key in sorted(keyed)
                if key.startswith(prefix)
                and keyed[key].get("type") == "file"
                and all(base.is_segment(name) for name in key.split("/"))
            ]
        )

    def delete(self, key: str) -> None:
        path = self._path(key)
        with suppress(errors.ObjectNotFoundError), self._reading(key):
            self._call(self._fs.rm_file, path)

    def _path(self, key: str) -> str:
        return f"{self._root}/{base.check_key(key)}"

    def _call(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._counting:
            self._requests += 1
        with self._turn:
            return method(*args, **kwargs)

    def _info(self, path: str) -> Mapping[str, Any]:
        self._fs.invalidate_cache()
        info: Mapping[str, Any] = self._call(self._fs.info, path)
        if info.get("type") == "directory":
            raise IsADirectoryError(path)
        return info

    def _nbytes(self, key: str, path: str) -> int:
        return self._described(key, self._info(path)).nbytes

    def _described(self, key: str, info: Mapping[str, Any]) -> base.ObjectInfo:
        if info.get("size") is None:
            raise errors.StoreUnavailableError(
                f"{self.url} does not tell how large {key!r} is", key=key, url=self.url
            )
        return base.ObjectInfo(key=key, nbytes=int(info["size"]), modified=modified(info))

    def _read_in_pieces(self, key: str, path: str, nbytes: int) -> memoryview:
        whole = memoryview(bytearray(nbytes))
        for first in range(0, nbytes, _PIECE * _TOGETHER):
            last = min(nbytes, first + _PIECE * _TOGETHER)
            starts = list(range(first, last, _PIECE))
            ends = [min(start + _PIECE, last) for start in starts]
            paths = [path] * len(starts)
            pieces = self._call(self._fs.cat_ranges, paths, starts, ends, on_error="raise")
            for start, end, piece in zip(starts, ends, pieces, strict=True):
                if len(piece) != end - start:
                    raise base.too_short(key, self.url, nbytes=start + len(piece), end=end)
                whole[start:end] = piece
        return whole

    def _write(self, path: str, key: str, data: bytes) -> None:
        self._check_writable(key)
        with self._writing(key):
            if self._promises.writes == "put":
                self._call(self._fs.pipe_file, path, data)
            else:
                self._write_beside(path, data)

    def _write_beside(self, path: str, data: bytes) -> None:
        """Write under a temporary name that no key can have, then rename."""
        folder = path.rpartition("/")[0]
        temporary = f"{folder}/.tmp-{secrets.token_hex(8)}"
        self._call(self._fs.makedirs, folder, exist_ok=True)
        try:
            self._call(self._fs.pipe_file, temporary, data)
            self._refuse_folder(path)
            if self._promises.writes == "swap" and self._call(self._fs.exists, path):
                self._call(self._fs.rm_file, path)
            self._call(self._fs.mv, temporary, path)
        except BaseException:
            with suppress(*self._failures):  # only the result of the write counts
                self._call(self._fs.rm_file, temporary)
            raise

    def _refuse_folder(self, path: str) -> None:
        # Some file systems move a file into an existing folder of the target name.
        if self._call(self._fs.isdir, path):
            raise IsADirectoryError(path)

    def _check_writable(self, key: str) -> None:
        if self._promises.writes == "none":
            raise errors.ConfigError(
                f"{self.url}: deltachain does not know how to write an object whole here",
                hint="follow from here, and publish where it knows: " + ", ".join(PROMISES),
            )
        # gcsfs caches the bucket's type. Zonal buckets overwrite instead of failing to create.
        ask = getattr(self._fs, "_is_zonal_bucket", None)
        if ask is not None:
            from fsspec.asyn import sync  # noqa: PLC0415 - gcsfs has imported it

            with self._writing(key):
                if sync(self._fs.loop, ask, self._root.partition("/")[0]):
                    raise errors.ConfigError(
                        f"{self.url} is a zonal bucket, which overwrites what it should create",
                        hint="use a bucket that is not zonal",
                    )

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        try:
            yield
        except errors.DeltaChainError:
            raise
        except _NO_OBJECT as exc:
            if (failure := unanswered(exc)) is not None:
                raise store_error(failure, key, self.url) from failure
            raise base.not_found(key, self.url) from exc
        except self._failures as exc:
            raise store_error(exc, key, self.url) from exc

    @contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        try:
            yield
        except errors.DeltaChainError:
            raise
        except _IN_THE_WAY as exc:
            raise errors.ConfigError(
                f"key {key!r} in {self.url}: a folder of other objects has this name, or an "
                "object is in the place of a folder"
            ) from exc
        except FileNotFoundError as exc:
            hint = "make the bucket or the share first; check its name"
            raise base.unavailable(key, self.url, "there is no place for it", hint) from exc
        except self._failures as exc:
            raise store_error(exc, key, self.url) from exc


def _as_bytes(data: Buffer) -> bytes:
    # Not a view: some libraries treat anything but bytes as a sequence of numbers.
    return data if isinstance(data, bytes) else bytes(base.bytes_view(data))


def _raise_unless_gone(error: Exception) -> None:
    if not isinstance(error, FileNotFoundError):  # deleted after its folder was listed
        raise error


def open_fsspec(
    url: str,
    options: Mapping[str, Any] | None = None,
    *,
    writer: bool = False,  # noqa: ARG001 - as every opener
) -> FsspecStore:
    filesystem, path, shown = locate(url, options)
    return FsspecStore(filesystem, path, url=shown)


def locate(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str, str]:
    scheme = url.partition(":")[0].lower()
    fsspec = _fsspec(scheme)
    if scheme not in fsspec.available_protocols():
        raise errors.ConfigError(
            f"store URLs that begin with {scheme}:// are not supported",
            hint=_known(),
        )
    if scheme in WRAPPERS or "::" in url:
        raise errors.ConfigError(
            f"{scheme}:// shows another file system, whose guarantees are lost on the way",
            hint="give the URL of the storage itself",
        )
    if not url[len(scheme) :].startswith("://") or "?" in url or "#" in url:
        raise errors.ConfigError(
            f"{scheme}:// store URLs have two slashes, no query and no fragment",
            hint="give credentials in the environment or as options",
        )
    try:
        urlsplit(url)
        shown = redacted_url(url).rstrip("/")
    except ValueError as exc:
        raise errors.ConfigError(f"{scheme}:// store URL whose host cannot be read") from exc
    try:
        filesystem, path = fsspec.core.url_to_fs(
            url, **{**(options or {}), "skip_instance_cache": True}
        )
    except ImportError as exc:
        package = PROMISES.get(scheme, UNKNOWN).package
        raise errors.ConfigError(
            f"{scheme}:// stores need a package that is not installed",
            hint=f"pip install '{package}'" if package else str(exc),
        ) from exc
    except (TypeError, ValueError) as exc:
        raise errors.ConfigError(
            f"{shown}: the file system does not take this URL with these options: "
            f"{', '.join(sorted(options or {})) or 'none'}"
        ) from exc
    except failures() as exc:
        raise store_error(exc, "", shown) from exc
    return filesystem, path, shown


def _fsspec(scheme: str) -> ModuleType:
    try:
        return import_module("fsspec")
    except ImportError as exc:
        raise errors.ConfigError(
            f"store URLs that begin with {scheme}:// need fsspec, or are not supported",
            hint=f"pip install '{_extra(scheme)}'; without it, {_known()}",
        ) from exc


def _known() -> str:
    names = ", ".join(sorted({*schemes(), *PROMISES}))
    return f"give the path of a folder, or a URL that begins with one of: {names}"


def _extra(scheme: str) -> str:
    package = PROMISES.get(scheme, UNKNOWN).package
    return package if package.startswith("deltachain[") else "deltachain[fsspec]"
