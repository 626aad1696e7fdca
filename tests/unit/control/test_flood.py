"""Very many callers at once."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.unit.control.replicas import app_of, followed, leader_of, served

TOKEN = "one that nobody guesses"  # noqa: S105
CALLERS = 500
SECONDS = 60.0
GROWTH = 64 << 20


@pytest.mark.slow
def test_500_callers_for_a_minute_see_no_error_and_cost_no_memory(tmp_path: Path) -> None:
    for here in followed(tmp_path):
        for leader in leader_of(here):
            leader.update(1)
            with served(app_of(leader, token=TOKEN)) as url:
                asyncio.run(_flood(url, 5.0))  # what is made once is made now
                here.publish(3)
                before = _resident()
                answers = asyncio.run(_flood(url, SECONDS))
                grown = _resident() - before
            assert set(answers) == {("GET", 200), ("POST", 200)}, answers
            assert min(answers.values()) > CALLERS
            assert grown < GROWTH, f"{grown:,} bytes more"
            assert here.holds(3)


def _resident() -> int:
    """Bytes of memory of this process: server, callers and all."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _flood(url: str, seconds: float) -> Counter[tuple[str, int]]:
    limits = httpx.Limits(max_connections=CALLERS)
    headers = {"authorization": f"Bearer {TOKEN}"}
    answers: Counter[tuple[str, int]] = Counter()
    end = time.monotonic() + seconds

    async def call(client: httpx.AsyncClient, number: int) -> None:
        while time.monotonic() < end:
            if number % 2:
                answer = await client.get("/v1/deltachain/status")
            else:
                answer = await client.post("/v1/deltachain/update", json={})
            answers[answer.request.method, answer.status_code] += 1

    async with httpx.AsyncClient(
        base_url=url, limits=limits, headers=headers, timeout=120, trust_env=False
    ) as client:
        await asyncio.gather(*(call(client, number) for number in range(CALLERS)))
    return answers
