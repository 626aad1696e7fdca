"""Texts that are no document, and documents that are of no model."""

from __future__ import annotations

from typing import Any

from blake3 import blake3

MANY = b"9" * 10_000


def enveloped(payload: bytes, signatures: bytes = b"[]") -> bytes:
    digest = blake3(payload).hexdigest().encode()
    return b'{"blake3":"%s","payload":%s,"signatures":%s}' % (digest, payload, signatures)


def no_documents(data: bytes) -> dict[str, bytes]:
    deep = b"[" * 200_000 + b"]" * 200_000
    return {
        "nothing": b"",
        "something behind it": data + b"{}",
        "a byte order mark": b"\xef\xbb\xbf" + data,
        "another encoding": data.decode().encode("utf-16"),
        "no text": data.replace(b'"ext":{}', b'"ext":{"x":"\xff"}'),
        "no text in a name": data.replace(b'"ext":{}', b'"ext":{"\xff":1}'),
        "half a character": data.replace(b'"ext":{}', b'"ext":{"x":"\\ud800"}'),
        "no number": data.replace(b'"ext":{}', b'"ext":{"x":NaN}'),
        "a float beyond all": data.replace(b'"ext":{}', b'"ext":{"x":1e999}'),
        "a number of many digits": data.replace(b'"format":1', b'"format":' + b"1" * 100_000),
        "many digits where anything goes": data.replace(b'"ext":{}', b'"ext":{"x":' + MANY + b"}"),
        "a deep nest": deep,
        "a deep nest where anything goes": data.replace(b'"ext":{}', b'"ext":{"x":' + deep + b"}"),
        "a field twice": data.replace(b'"ext":{}', b'"ext":{},"ext":{}'),
        "a field twice where anything goes": data.replace(b'"ext":{}', b'"ext":{"a":1,"a":1}'),
        "a list": b"[]",
        "null": b"null",
    }


KEYS = (
    "/etc/passwd",
    "../x",
    "a/../b",
    ".hidden",
    "a//b",
    "a/",
    "a\n",
    "é",
    "a" * 256,
    "a b",
    "aaaa/" * 110 + "a",
)

TABLES: dict[str, dict[str, Any]] = {
    "a name twice": {"tensors": [["a", "F32", [1]], ["a", "F32", [2]]], "aliases": {}},
    "a dtype that has no wire form": {"tensors": [["a", "F4", [1]]], "aliases": {}},
    "a dimension below zero": {"tensors": [["a", "F32", [-1]]], "aliases": {}},
    "a huge tensor": {"tensors": [["a", "F32", [1 << 40, 1 << 40]]], "aliases": {}},
    "very many dimensions": {"tensors": [["a", "F32", [2**62] * 50_000]], "aliases": {}},
    "an alias of nothing": {"tensors": [["a", "F32", [1]]], "aliases": {"b": "c"}},
    "an alias that is a tensor": {"tensors": [["a", "F32", [1]]], "aliases": {"a": "a"}},
    "a row of two": {"tensors": [["a", "F32"]], "aliases": {}},
    "a row of four": {"tensors": [["a", "F32", [1], 0]], "aliases": {}},
}
