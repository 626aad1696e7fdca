"""Configuration of a ``hf://`` store: URL, options and environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias
from urllib.parse import urlsplit

import msgspec

from deltachain.environment import read_one
from deltachain.errors import ConfigError
from deltachain.store.hf.api import BucketLocation, Budget, Hub
from deltachain.store.hf.store import HfStore

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
    most 200 of them and a reader at most 100. A follower that polls every 5 seconds uses 60, and
    one or two more for each version.

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
        raise ConfigError("hf:// store URLs name a bucket, and have no query", hint=_HINT)
    try:
        given = msgspec.convert(dict(options or {}), _Options)
    except msgspec.ValidationError as exc:  # its message shows no value
        raise ConfigError(f"hf:// stores do not take these options: {exc}") from exc
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
        raise ConfigError(
            f"the endpoint of the Hub, {_named_by(options)}, is no address of a server",
            hint="write it as https://HOST:PORT, or leave it out",
        )
    return endpoint


def _named_by(options: _Options) -> str:
    if options.endpoint is not None:
        return "of the option endpoint"
    return "in HF_ENDPOINT" if os.environ.get("HF_ENDPOINT") else ""


def _gateway(options: _Options, bucket: str) -> dict[str, str] | None:
    """Return options of an S3 store for the gateway; ``None`` without keys."""
    key = _or_variable(options.s3_key, "HF_S3_ACCESS_KEY_ID")
    secret = _or_variable(options.s3_secret, "HF_S3_SECRET_ACCESS_KEY")
    if not key and not secret:
        return None
    if not key or not secret:
        raise ConfigError("the S3 gateway of the Hub needs an access key and its secret")
    namespace = bucket.partition("/")[0]
    endpoint = _or_variable(options.s3_endpoint, "HF_S3_ENDPOINT") or f"{_GATEWAY}/{namespace}"
    return {"endpoint_url": endpoint, "key": key, "secret": secret}


def _or_variable(value: str | None, variable: str) -> str:
    return os.environ.get(variable, "") if value is None else value
