"""Engines on an event loop: whoever waits for one in its own thread is told."""

from __future__ import annotations

import asyncio

import pytest

from deltachain.errors import ApplyError, ConfigError, PartialApplyError
from deltachain.replica.engine import run_on


async def _answer(found: object) -> object:
    await asyncio.sleep(0)
    if isinstance(found, Exception):
        raise found
    return found


def test_another_thread_gets_the_answer() -> None:
    async def main() -> object:
        return await asyncio.to_thread(run_on, asyncio.get_running_loop(), _answer(7))

    assert asyncio.run(main()) == 7


def test_the_thread_of_the_loop_is_refused_at_once() -> None:
    async def main() -> None:
        run_on(asyncio.get_running_loop(), _answer(7))

    with pytest.raises(ConfigError, match="runs the event loop of the engine") as caught:
        asyncio.run(main())
    assert "asyncio.to_thread" in caught.value.hint


@pytest.mark.parametrize(
    ("raised", "kind", "told"),
    [
        (RuntimeError("EngineCore died"), ApplyError, "did not answer: EngineCore died"),
        (PartialApplyError("taken back"), PartialApplyError, "taken back"),
    ],
)
def test_errors_of_the_engine_are_typed(
    raised: Exception, kind: type[Exception], told: str
) -> None:
    async def main() -> None:
        await asyncio.to_thread(run_on, asyncio.get_running_loop(), _answer(raised))

    with pytest.raises(kind, match=told):
        asyncio.run(main())
