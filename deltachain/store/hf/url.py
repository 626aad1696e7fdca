"""Configuration of a ``hf://`` store: URL, options and environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from deltachain.environment import read_one
from deltachain.errors import ConfigError
from deltachain.store.hf.api import BucketLocation, Budget, Hub
from deltachain.store.hf.gateway import GatewayKey
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

_TEXTS: Final = frozenset({"token", "endpoint", "s3_key", "s3_secret", "s3_endpoint"})
_NUMBERS: Final = frozenset({"calls", "window_s", "deadline_s"})


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
    given = dict(options or {})
    if unknown := given.keys() - _TEXTS - _NUMBERS:
        raise ConfigError(f"hf:// stores take no options: {', '.join(sorted(unknown))}")
    bucket, prefix = match["bucket"], (match["prefix"] or "").rstrip("/")
    place = BucketLocation(
        endpoint=_endpoint(given),
        named_by=_named_by(given),
        bucket=bucket,
        url=f"hf://buckets/{bucket}/{prefix}".rstrip("/"),
        token=_text(given, "token") or None,
    )
    calls = _calls(given, WRITER_CALLS if writer else READER_CALLS)
    budget = Budget(calls, _number(given, "window_s", WINDOW_S))
    hub = Hub(place, budget, deadline_s=_number(given, "deadline_s", DEADLINE_S))
    return HfStore(hub, prefix, gateway=_gateway(given, bucket))


def _endpoint(options: Mapping[str, Any]) -> str:
    endpoint = (_text(options, "endpoint", "HF_ENDPOINT") or _HUB).rstrip("/")
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


def _named_by(options: Mapping[str, Any]) -> str:
    if options.get("endpoint") is not None:
        return "of the option endpoint"
    return "in HF_ENDPOINT" if os.environ.get("HF_ENDPOINT") else ""


def _gateway(options: Mapping[str, Any], bucket: str) -> GatewayKey | None:
    key = _text(options, "s3_key", "HF_S3_ACCESS_KEY_ID")
    secret = _text(options, "s3_secret", "HF_S3_SECRET_ACCESS_KEY")
    if not key and not secret:
        return None
    if not key or not secret:
        raise ConfigError("the S3 gateway of the Hub needs an access key and its secret")
    namespace = bucket.partition("/")[0]
    endpoint = _text(options, "s3_endpoint", "HF_S3_ENDPOINT") or f"{_GATEWAY}/{namespace}"
    return GatewayKey(endpoint=endpoint, key_id=key, secret=secret)


def _text(options: Mapping[str, Any], name: str, variable: str = "") -> str:
    value = options.get(name)
    if value is None:
        return os.environ.get(variable, "") if variable else ""
    if not isinstance(value, str):
        raise ConfigError(f"option {name} of a hf:// store is a string")
    return value


def _calls(options: Mapping[str, Any], default: int) -> int:
    named = "calls" in options
    value = options["calls"] if named else read_one(os.environ, "HF_CALLS") or default
    try:
        calls = int(value)
    except (TypeError, ValueError):
        calls = 0
    if calls < 1:
        raise ConfigError("option calls of a hf:// store is a number of requests, at least 1")
    return calls


def _number(options: Mapping[str, Any], name: str, default: float) -> float:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise ConfigError(f"option {name} of a hf:// store is a number of seconds")
    return float(value)
