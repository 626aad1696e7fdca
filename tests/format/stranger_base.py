"""Refusals, digests and strict JSON, which both of the stranger's readers need."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from blake3 import blake3

U64: Final = (1 << 64) - 1


class RefusedError(Exception):
    """The bytes are not what FORMAT.md says."""


class UnsupportedError(RefusedError):
    """They may be what a later FORMAT.md says."""


def require(condition: object, why: str) -> None:
    if not condition:
        raise RefusedError(why)


def digest_of(data: bytes) -> str:
    return blake3(data).hexdigest()


# Section 6


def tensor_key(name: str, dtype: str, shape: Sequence[int]) -> tuple[int, int]:
    text = " ".join((dtype, ",".join(str(dim) for dim in shape), name))
    h = blake3(text.encode()).digest()
    return int.from_bytes(h[:8], "little"), int.from_bytes(h[8:16], "little")


def mix(key: int, i: int, b: int) -> int:
    x = ((key + i * 0x9E3779B97F4A7C15) & U64) ^ b
    x = x * 0xD6E8FEB86659FD93 & U64
    x ^= x >> 32
    x = x * 0xA0761D6478BD642F & U64
    return x ^ x >> 29


def state_text(lanes: Sequence[int]) -> str:
    return "".join(f"{lane & U64:016x}" for lane in lanes)


def tensor_lanes(name: str, dtype: str, shape: Sequence[int], bits: Sequence[int]) -> list[int]:
    keys = tensor_key(name, dtype, shape)
    return [sum(mix(key, i, b) for i, b in enumerate(bits)) for key in keys]


# Section 2: strict JSON


def read_json(data: bytes) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        require(len(dict(items)) == len(items), "a field is there twice")
        return dict(items)

    def constant(text: str) -> None:
        raise RefusedError(f"{text} is not JSON")

    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as exc:
        raise RefusedError(str(exc)) from exc


def write_json(document: object) -> bytes:
    try:
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise RefusedError("half a character") from exc


def is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def check_fields(document: Any, fields: Mapping[str, type]) -> None:
    """All fields in order, of their types; integers are sizes."""
    require(isinstance(document, dict) and list(document) == list(fields), "other fields")
    for name, kind in fields.items():
        value = document[name]
        require(is_size(value) if kind is int else isinstance(value, kind), f"{name}: type")


def check_sizes(values: Any, what: str) -> None:
    require(isinstance(values, list) and all(map(is_size, values)), what)
