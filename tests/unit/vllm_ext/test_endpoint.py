"""The endpoint plugin of a vLLM server, without vLLM."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from fastapi import FastAPI

from deltachain.control.server import Control
from deltachain_vllm.endpoint import EndpointPlugin


async def _started(
    environment: dict[str, str], engines: int = 1, mode: str = "", **arguments: Any
) -> Control:
    app = FastAPI()
    parallel = SimpleNamespace(data_parallel_size=engines, **({mode: True} if mode else {}))
    client = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    with mock.patch.dict("os.environ", environment):
        await EndpointPlugin().init_state(client, app.state, Namespace(**arguments))
    control: Control = app.state.deltachain
    return control


@pytest.mark.parametrize(
    ("environment", "arguments", "refusal"),
    [
        ({"DELTACHAIN_MAX_LAG": "y"}, {}, "expected a number"),
        ({}, {"api_server_count": 2}, "--api-server-count 1"),
        ({}, {"engines": 2, "api_server_count": 2}, "2 servers without --data-parallel-size"),
        ({}, {"mode": "enable_eplb"}, "moves experts while it serves (--enable-eplb)"),
        ({}, {"mode": "enable_elastic_ep"}, "start it without --enable-elastic-ep"),
    ],
)
def test_what_can_not_be_led_ends_or_says_why_where_it_was_told_to_serve(
    environment: dict[str, str], arguments: dict[str, Any], refusal: str
) -> None:
    named = {"DELTACHAIN_URL": "x", **environment}
    with pytest.raises(SystemExit) as ended:
        asyncio.run(_started(named, **arguments))
    assert ended.value.code == 2
    control = asyncio.run(_started({**named, "DELTACHAIN_STRICT": "0"}, **arguments))
    assert control.leader is None
    assert refusal in control.refusal


def test_a_server_that_was_told_of_no_chain_starts() -> None:
    control = asyncio.run(_started({}))
    assert control.leader is None
    assert "DELTACHAIN_URL is not set" in control.refusal


@pytest.mark.parametrize(
    ("key", "is_guarded"),
    [(None, False), ("", False), ([""], False), ([], False), ("k", True), (["", "k"], True)],
)
def test_an_empty_key_guards_nothing(key: object, is_guarded: bool) -> None:
    """vLLM drops empty keys; so does ``--api-key "$UNSET"``."""
    control = asyncio.run(_started({}, api_key=key, host="0.0.0.0"))  # noqa: S104
    assert control.is_guarded is is_guarded
    assert not control._is_open


def test_the_end_of_the_server_ends_its_presence() -> None:
    app, presence = FastAPI(), mock.Mock()
    EndpointPlugin().attach_router(app)
    app.state.deltachain = SimpleNamespace(leader=None, presence=presence)

    async def live() -> None:
        async with app.router.lifespan_context(app):
            presence.close.assert_not_called()

    asyncio.run(live())
    presence.close.assert_called_once_with()
