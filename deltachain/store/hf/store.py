"""Objects in a bucket of the Hugging Face Hub: ``hf://buckets/namespace/name/prefix``.

The Hub's API maps paths to hashes; the content is in Xet storage and is read by hash. A ``read``
pinned to a hash therefore costs no API request, and returns that content even if the path has other
content by now. Number of API requests of each call, in addition to a read token and a write token
for the storage about once an hour:

=================  ===========================================================
``read`` (pinned)  0
``read``, ``get``  1
``find_all``       1 for each 1,000 keys
``put``            1
``put_if_absent``  2; 1 through the S3 gateway
``list``           1 for each 1,000 objects below the folder of the prefix
``delete``         1; 2 if no object exists
=================  ===========================================================
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, TypeAlias
from urllib.parse import quote, urlsplit

import msgspec

from deltachain import errors
from deltachain.environment import read_one
from deltachain.store import base
from deltachain.store.hf.api import IN_BETWEEN, BucketLocation, Budget, Hub
from deltachain.store.hf.xet import Xet
from deltachain.types import Buffer

_PROBES: Final = 1000  # number of paths in one lookup request, as in huggingface_hub

_HINT_GATEWAY: Final = (
    "check HF_S3_ACCESS_KEY_ID and HF_S3_SECRET_ACCESS_KEY, what they may do, the bucket, and the "
    "option s3_endpoint"
)


@base.guarded
class HfStore(base.Store):
    """Objects below a prefix of one bucket.

    *Single writer.* The Hub's API has no conditional write, so ``put_if_absent`` checks first: two
    concurrent callers may both return, and the later object stays. With a ``gateway``, the Hub's S3
    gateway decides, and exactly one returns.

    *Consistency.* The Hub documents none. Nothing is cached between calls: every ``find`` and every
    unpinned read sends a request.

    *Integrity.* The length of an object is checked, its bytes are not: a bit flipped in the storage
    or in transit is not detected. Callers compare digests.

    Failed requests are retried, and rate limits of the Hub waited for, within ``deadline_s`` of the
    ``Hub``. Transfers are given up only if no byte moves for that long. Redirects are followed to
    the same server only. A write counts as done if the reply reports no failure in the Hub's
    format; otherwise the path is looked up.
    """

    def __init__(
        self, hub: Hub, prefix: str = "", *, gateway: Mapping[str, Any] | None = None
    ) -> None:
        self._hub = hub
        self._xet = Xet(hub)
        self._folder = f"{base.check_key(prefix)}/" if prefix else ""
        self._gateway = None if gateway is None else _through_s3(hub, prefix, gateway)
        self._capabilities = base.Capabilities(
            conditional_put=gateway is not None,
            list_consistent=False,
            probes=_PROBES,
            poll_s=5.0,
        )

    @property
    def url(self) -> str:
        return self._hub.place.url

    @property
    def capabilities(self) -> base.Capabilities:
        return self._capabilities

    @property
    def requests(self) -> int:
        """Number of requests to the Hub's rate-limited API; storage requests are not counted."""
        return self._hub.calls.requests + (self._gateway.requests if self._gateway else 0)

    @property
    def unanswered_since(self) -> float | None:
        return self._hub.calls.since

    def get(self, key: str, *, limit: int = base.MAX_DOCUMENT) -> bytes:
        found = self._find(key)
        base.check_limit(key, self.url, nbytes=found.nbytes, limit=limit)
        return bytes(self._xet.read(found.pin, nbytes=found.nbytes, key=key))

    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        base.check_range(0, nbytes)
        base.check_key(key)
        if not pin:
            found = self._find(key)
            base.check_nbytes(key, self.url, expected=nbytes, actual=found.nbytes)
            pin = found.pin
        return self._xet.read(pin, nbytes=nbytes, key=key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        base.check_range(start, length)
        found = self._find(key)
        if start + length > found.nbytes:
            raise base.too_short(key, self.url, nbytes=found.nbytes, end=start + length)
        return bytes(self._xet.read_range(found.pin, start, length, key=key))

    def put(self, key: str, data: Buffer) -> str:
        content = self.upload(key, data)
        self.reveal({key: content})
        return content

    def upload(self, key: str, data: Buffer) -> str:
        """Upload content, which no path refers to before ``reveal``; takes no counted request."""
        return self._xet.write(data, key=base.check_key(key))

    def reveal(self, uploads: Mapping[str, str]) -> None:
        """Let paths refer to uploaded content, 1,000 in a request; see ``Store``."""
        keys = [base.check_key(key) for key in uploads]
        for first in range(0, len(keys), _PROBES):
            some = {key: uploads[key] for key in keys[first : first + _PROBES]}
            failed = self._batch([self._added(*one) for one in some.items()], next(iter(some)))
            if failed is None and not self._names(some):
                failed = f"a success that wrote nothing; {IN_BETWEEN}"
            if failed:
                named = next(iter(some)) if len(some) == 1 else f"{next(iter(some))} and others"
                raise errors.StoreUnavailableError(
                    f"object {named!r} in {self.url}: {failed}", key=next(iter(some)), url=self.url
                )

    def put_if_absent(self, key: str, data: Buffer) -> None:
        base.check_key(key)
        if self._gateway is None:
            if self.find(key) is not None:
                raise base.already_exists(key, self.url)
            self.put(key, data)
            return
        self._hub.admit(self._hub.deadline(key), key)
        before = self._gateway.requests
        try:
            self._gateway.put_if_absent(key, data)
        except errors.AlreadyExistsError as exc:
            raise base.already_exists(key, self.url) from exc
        except (errors.StoreError, errors.ConfigError) as exc:
            exc.args = (f"{self.url}: S3 gateway: {exc.args[0]}",)
            if isinstance(exc, errors.StoreError):
                exc.url = self.url
            if isinstance(exc, errors.StorePermissionError | errors.ConfigError):
                exc.hint = _HINT_GATEWAY
            raise
        finally:
            self._hub.charge(max(0, self._gateway.requests - before - 1))

    def find(self, key: str) -> base.ObjectInfo | None:
        return self.find_all([key]).get(key)

    def find_all(self, keys: Iterable[str]) -> Mapping[str, base.ObjectInfo]:
        asked = [base.check_key(key) for key in keys]
        found: dict[str, base.ObjectInfo] = {}
        for first in range(0, len(asked), _PROBES):
            some = asked[first : first + _PROBES]
            body = json.dumps({"paths": [self._path(key) for key in some]}).encode()
            reply = self._hub.call("POST", "paths-info", list, body=body, key=some[0])
            found |= {info.key: info for info in self._parse(reply.document())}
        return found

    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        """Read the whole listing before the first object, as the Hub guarantees no order."""
        return self._list(base.check_prefix(prefix))

    def clock(self) -> float | None:
        return self._hub.calls.now()

    def delete(self, key: str) -> None:
        """Delete an object if it exists; see ``Store``. Its content stays in the storage."""
        base.check_key(key)
        failed = self._batch([{"type": "deleteFile", "path": self._path(key)}], key)
        # The Hub reports an absent object as a failure, with an undocumented message.
        if failed != "" and self.find(key) is not None:
            raise base.unavailable(key, self.url, failed or "it was not deleted")

    def close(self) -> None:
        """Close the gateway's connections; those of ``huggingface_hub`` are shared."""
        if self._gateway is not None:
            self._gateway.close()

    def _path(self, key: str) -> str:
        return f"{self._folder}{key}"

    def _find(self, key: str) -> base.ObjectInfo:
        found = self.find(key)
        if found is None:
            raise base.not_found(key, self.url)
        return found

    def _list(self, prefix: str) -> Iterator[base.ObjectInfo]:
        folder = self._path(prefix).rpartition("/")[0]
        route = f"tree/{quote(folder, safe='')}" if folder else "tree"
        following = f"{route}?recursive=true"
        found: dict[str, base.ObjectInfo] = {}
        while following:
            reply = self._hub.call("GET", following, list)
            if reply.status == 404:  # no such folder
                break
            page = reply.document()
            found |= {info.key: info for info in self._parse(page) if info.key.startswith(prefix)}
            following = reply.following
        for key in sorted(found):
            yield found[key]

    def _added(self, key: str, content: str) -> Mapping[str, Any]:
        modified = int(time.time() * 1000)
        path = self._path(key)
        return {"type": "addFile", "path": path, "xetHash": content, "mtime": modified}

    def _batch(self, operations: Sequence[Mapping[str, Any]], key: str) -> str | None:
        """Send operations; return the reason of a refusal, empty on success, None if unknown."""
        body = b"".join(json.dumps(one).encode() + b"\n" for one in operations)
        reply = self._hub.call(
            "POST", "batch", dict, body=body, media="application/x-ndjson", key=key
        )
        document = reply.document()
        failed = document.get("failed")
        if isinstance(failed, list):
            return "; ".join(str(each.get("error", "refused")) for each in failed)
        return "" if document.get("success") is True else None

    def _names(self, uploads: Mapping[str, str]) -> bool:
        return uploads == {key: found.pin for key, found in self.find_all(uploads).items()}

    def _parse(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[base.ObjectInfo]:
        for row in rows:
            path = row["path"]  # fails unless a string; the store's boundary converts the error
            if row["type"] == "file" and path.startswith(self._folder):
                yield base.ObjectInfo(
                    key=path.removeprefix(self._folder),
                    nbytes=int(row["size"]),
                    modified=_seconds(row.get("uploadedAt") or row.get("mtime")),
                    pin=str(row["xetHash"]),
                )


def _through_s3(hub: Hub, prefix: str, key: Mapping[str, Any]) -> base.Store:
    try:
        import boto3  # noqa: F401, PLC0415 - an extra

        from deltachain.store.s3.store import S3Store  # noqa: PLC0415 - needs boto3
    except ImportError as exc:
        raise errors.ConfigError(
            "the S3 gateway of the Hub needs boto3", hint="pip install 'deltachain[s3]'"
        ) from exc
    options = {
        **key,
        "region": "us-east-1",
        "deadline_s": hub.deadline_s,
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }
    bucket = hub.place.bucket.partition("/")[2]
    return S3Store(bucket, prefix, options, conditions_hold=True)


def _seconds(date: str | None) -> float | None:
    return datetime.fromisoformat(date).timestamp() if date else None


READER_CALLS: Final = 100
WRITER_CALLS: Final = 200
WINDOW_S: Final = 300.0
DEADLINE_S: Final = 60.0

_URL: Final = re.compile(
    r"(?i:hf)://buckets/(?P<bucket>[A-Za-z0-9._-]+/[A-Za-z0-9._-]+)(?:/(?P<prefix>[^?#]*))?",
    re.ASCII,
)
_HINT: Final = "write hf://buckets/namespace/name/prefix"
_HUB: Final = "https://huggingface.co"
_GATEWAY: Final = "https://s3.hf.co"

_Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, lt=1e6)]


class _Options(msgspec.Struct, forbid_unknown_fields=True):
    token: str | None = None
    endpoint: str | None = None
    calls: Annotated[int, msgspec.Meta(ge=1)] | None = None
    window_s: _Seconds = WINDOW_S
    deadline_s: _Seconds = DEADLINE_S
    s3_key: str | None = None
    s3_secret: str | None = None
    s3_endpoint: str | None = None


def open_hf(url: str, options: Mapping[str, Any] | None = None, *, writer: bool = False) -> HfStore:
    """Open the store at ``hf://buckets/namespace/name/prefix``; send no request.

    A free account has 1,000 API requests in 5 minutes, shared by all its tokens. A writer uses at
    most 200 of them and a reader at most 100. A follower that polls every 5 seconds uses 70, and
    up to two more for each version.

    Args:
        url: URL of the store.
        options: ``token`` (else ``HF_TOKEN``, else the one saved by ``hf auth login``),
            ``endpoint`` (else ``HF_ENDPOINT``), ``calls`` (else ``DELTACHAIN_HF_CALLS``) in
            ``window_s`` seconds, ``deadline_s`` as the time limit of one call; and for conditional
            writes ``s3_key`` and ``s3_secret`` of the Hub's S3 gateway (else
            ``HF_S3_ACCESS_KEY_ID`` and ``HF_S3_SECRET_ACCESS_KEY``) at ``s3_endpoint`` (else
            ``HF_S3_ENDPOINT``).
        writer: Whether a publisher opens the store.

    Raises:
        ConfigError: The URL or an option is wrong, or an extra is not installed.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise errors.ConfigError("hf:// store URLs name a bucket, and have no query", hint=_HINT)
    try:
        given = msgspec.convert(dict(options or {}), _Options)
    except msgspec.ValidationError as exc:  # its message shows no value
        raise errors.ConfigError(f"hf:// stores do not take these options: {exc}") from exc
    bucket, prefix = match["bucket"], (match["prefix"] or "").rstrip("/")
    place = BucketLocation(
        endpoint=_endpoint(given),
        named_by=_named_by(given),
        bucket=bucket,
        url=f"hf://buckets/{bucket}/{prefix}".rstrip("/"),
        token=given.token or None,
    )
    calls = given.calls or read_one(os.environ, "HF_CALLS")
    budget = Budget(calls or (WRITER_CALLS if writer else READER_CALLS), given.window_s)
    hub = Hub(place, budget, deadline_s=given.deadline_s)
    return HfStore(hub, prefix, gateway=_gateway(given, bucket))


def _endpoint(options: _Options) -> str:
    endpoint = (_or_variable(options.endpoint, "HF_ENDPOINT") or _HUB).rstrip("/")
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # names a part, which may be a secret
        is_address = False
    if not is_address:
        raise errors.ConfigError(
            f"the endpoint of the Hub, {_named_by(options)}, is no address of a server",
            hint="write it as https://HOST:PORT, or leave it out",
        )
    return endpoint


def _named_by(options: _Options) -> str:
    if options.endpoint is not None:
        return "of the option endpoint"
    return "in HF_ENDPOINT" if os.environ.get("HF_ENDPOINT") else ""


def _gateway(options: _Options, bucket: str) -> dict[str, str] | None:
    key = _or_variable(options.s3_key, "HF_S3_ACCESS_KEY_ID")
    secret = _or_variable(options.s3_secret, "HF_S3_SECRET_ACCESS_KEY")
    if not key and not secret:
        return None
    if not key or not secret:
        raise errors.ConfigError("the S3 gateway of the Hub needs an access key and its secret")
    namespace = bucket.partition("/")[0]
    endpoint = _or_variable(options.s3_endpoint, "HF_S3_ENDPOINT") or f"{_GATEWAY}/{namespace}"
    return {"endpoint_url": endpoint, "key": key, "secret": secret}


def _or_variable(value: str | None, variable: str) -> str:
    return os.environ.get(variable, "") if value is None else value
