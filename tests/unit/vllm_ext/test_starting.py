"""What is known of a vLLM server before it loads anything, without vLLM."""

from __future__ import annotations

import pytest

from deltachain.errors import ConfigError
from deltachain_vllm.starting import check_plugins, is_server


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


@pytest.mark.parametrize("named", ["", "deltachain", "deltachain_http_x", "other,deltachain"])
def test_a_server_without_our_routes_is_refused(named: str) -> None:
    with pytest.raises(ConfigError, match="loads no routes") as caught:
        check_plugins(named)
    assert "VLLM_PLUGINS=deltachain,deltachain_http" in caught.value.hint
