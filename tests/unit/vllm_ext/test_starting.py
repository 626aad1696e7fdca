"""What is known of a vLLM server before it loads anything, without vLLM."""

from __future__ import annotations

import sys

import pytest

from deltachain.errors import ConfigError
from deltachain_vllm.starting import check_front, check_plugins, check_start, is_server


@pytest.mark.parametrize(
    ("command", "serves"),
    [
        (["/venv/bin/vllm", "serve", "model"], True),
        (["/x/vllm/entrypoints/cli/main.py", "serve", "model"], True),
        (["/x/vllm/entrypoints/openai/api_server.py", "--model", "model"], True),
        (["/venv/bin/vllm", "serve", "model", "--headless"], False),
        (["/venv/bin/vllm", "bench", "throughput"], False),
        (["train.py", "serve"], False),
        (["-c"], False),
        ([], False),
    ],
)
def test_a_server_is_known_by_its_command(command: list[str], serves: bool) -> None:
    assert is_server(command) is serves


@pytest.mark.parametrize(
    ("command", "environment", "named"),
    [
        (["vllm", "serve", "model", "--grpc"], {}, "--grpc"),
        (["vllm", "serve", "model"], {"VLLM_USE_RUST_FRONTEND": "1"}, "VLLM_USE_RUST_FRONTEND"),
    ],
)
def test_a_front_end_without_plugins_is_refused_by_name(
    command: list[str], environment: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        check_front(command, environment)
    check_front(command[:3], {"VLLM_USE_RUST_FRONTEND": "0"})


def test_a_program_with_an_engine_is_told_that_it_follows_nothing_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    check_start()
    assert "call deltachain_vllm.subscribe(engine, url)" in caplog.text


@pytest.mark.parametrize("named", ["", "deltachain", "deltachain_http_x", "other,deltachain"])
def test_a_server_without_our_routes_is_refused(named: str) -> None:
    with pytest.raises(ConfigError, match="loads no routes") as caught:
        check_plugins(named)
    assert "VLLM_PLUGINS=deltachain,deltachain_http" in caught.value.hint
