"""Bodies that arrive a byte at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from threading import Event

import httpx
import pytest

from deltachain.control import server as auth
from tests.unit.control.replicas import app_of, followed, leader_of, served


def test_a_body_that_does_not_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "BODY_S", 0.3)
    stop = Event()

    async def trickle(url: str) -> int:
        async def body() -> AsyncIterator[bytes]:
            while not stop.is_set():
                yield b" "
                await asyncio.sleep(0.05)

        async with httpx.AsyncClient(timeout=60) as asking:
            headers = {"Authorization": "Bearer t"}
            try:
                sent = asking.post(f"{url}/v1/deltachain/update", content=body(), headers=headers)
                return (await sent).status_code
            except httpx.TransportError:  # closed while it was sent
                return 408
            finally:
                stop.set()

    for here in followed(tmp_path):
        for leader in leader_of(here):
            with served(app_of(leader, token="t")) as url:  # noqa: S106
                assert asyncio.run(asyncio.wait_for(trickle(url), 60)) == 408
            assert here.holds(0)
