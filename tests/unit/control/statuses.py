"""Statuses of replicas, made by hand."""

from __future__ import annotations

from typing import Any

from deltachain.status import Status


def status(version: int | None = 7, **fields: Any) -> Status:
    """Status of a replica that is ready at the head, but for the given fields."""
    usual: dict[str, Any] = {
        "url": "s3://b/x",
        "chain": "c" * 32,
        "version": version,
        "manifest": f"{version:064d}" if version is not None else None,
        "state": None,
        "staged": None,
        "head": version,
        "lag_versions": 0,
        "ready": True,
        "reason": "",
        "following": True,
        "paused": False,
        "pinned": False,
        "poisoned": False,
        "classes": {},
        "on_host": {},
        "ranks": [],
        "last": None,
        "trouble": "",
        "silence_s": 0.5,
        "engine": "fake/1.0",
        "deltachain": "0.1.0",
    }
    return Status(**usual | fields)
