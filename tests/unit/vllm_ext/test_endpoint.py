"""The endpoint plugin of a vLLM server, without vLLM."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any
from unittest import mock

import pytest
from fastapi import FastAPI

from deltachain.control.gate import Control
from deltachain_vllm.endpoint import EndpointPlugin


async def _started(environment: dict[str, str], **arguments: Any) -> Control:
    app = FastAPI()
    with mock.patch.dict("os.environ", environment):
        await EndpointPlugin().init_state(object(), app.state, Namespace(**arguments))
    control: Control = app.state.deltachain
    return control


@pytest.mark.parametrize(
    ("environment", "arguments", "refusal"),
    [
        ({}, {}, "DELTACHAIN_URL is not set"),
        ({"DELTACHAIN_URL": "x", "DELTACHAIN_MAX_LAG": "y"}, {}, "not a number"),
        ({"DELTACHAIN_URL": "x"}, {"api_server_count": 2}, "several front ends"),
    ],
)
def test_what_can_not_be_led_is_told_and_the_server_starts(
    environment: dict[str, str], arguments: dict[str, Any], refusal: str
) -> None:
    control = asyncio.run(_started(environment, **arguments))
    assert control.leader is None
    assert refusal in control.refusal


@pytest.mark.parametrize(
    ("key", "is_guarded"),
    [(None, False), ("", False), ([""], False), ([], False), ("k", True), (["", "k"], True)],
)
def test_an_empty_key_guards_nothing(key: object, is_guarded: bool) -> None:
    """vLLM drops empty keys; so does ``--api-key "$UNSET"``."""
    control = asyncio.run(_started({}, api_key=key, host="0.0.0.0"))  # noqa: S104
    assert control.is_guarded is is_guarded
    assert not control._is_open
