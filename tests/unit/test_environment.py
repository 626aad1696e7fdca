"""Every variable of the environment means something, or is refused."""

import re
from pathlib import Path

import pytest

from deltachain.environment import FALSE, PREFIX, SECRETS, TRUE, VARIABLES, is_strict, read
from deltachain.errors import ConfigError
from deltachain.replica.settings import ReplicaSettings

ROOT = Path(__file__).parents[2]
URL = {"DELTACHAIN_URL": "s3://bucket/run"}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("DELTACHAIN_ULR", "DELTACHAIN_URL"),
        ("DELTACHAIN_POLL", "DELTACHAIN_POLL_S"),
        ("DELTACHAIN_MAXLAG", "DELTACHAIN_MAX_LAG"),
        ("DELTACHAIN_url", "DELTACHAIN_URL"),
        ("DELTACHAIN_PORT", "DELTACHAIN_"),
        ("DELTACHAIN_", "DELTACHAIN_"),
    ],
)
@pytest.mark.parametrize("value", ["", "1"])
def test_a_name_that_means_nothing_is_refused_by_the_nearest_that_does(
    name: str, near: str, value: str
) -> None:
    for others in ({}, URL):
        with pytest.raises(ConfigError, match=f"^{name} is not a known variable") as caught:
            ReplicaSettings.of(others | {name: value})
        assert near in caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FOLLOW", "maybe"),
        ("FOLLOW", "2"),
        ("STRICT", "very"),
        ("MAX_LAG", "-1"),
        ("MAX_LAG", "1.5"),
        ("MAX_SILENCE_S", "0"),
        ("MAX_SILENCE_S", "10m"),
        ("POLL_S", "0"),
        ("POLL_S", "-1"),
        ("POLL_S", "1e999"),
        ("POLL_S", "nan"),
        ("POLL_S", "often"),
        ("STAGE_BUDGET", "-1"),
        ("STAGE_BUDGET", "4GiB"),
        ("HF_CALLS", "0"),
        ("TOKEN", "  \n"),
        ("TOKEN", "one\x00other"),
        ("URL", " "),
        ("PAUSE", "\t"),
    ],
)
def test_a_value_that_means_nothing_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^DELTACHAIN_{name} is .*, expected ") as caught:
        ReplicaSettings.of(URL | {PREFIX + name: value})
    assert VARIABLES[name].meaning in caught.value.hint
    if name in SECRETS:
        assert value not in str(caught.value)


@pytest.mark.parametrize("word", [*TRUE, *FALSE, "TRUE", "Off"])
def test_switches_take_a_few_words(word: str) -> None:
    settings = ReplicaSettings.of(URL | {"DELTACHAIN_FOLLOW": word, "DELTACHAIN_STRICT": word})
    assert settings is not None
    assert settings.follow is settings.strict is (word.lower() in TRUE)


@pytest.mark.parametrize(
    ("environment", "strict"),
    [
        ({}, False),
        ({"DELTACHAIN_STRICT": "1"}, False),
        (URL, True),
        (URL | {"DELTACHAIN_STRICT": ""}, True),
        (URL | {"DELTACHAIN_STRICT": "0"}, False),
        (URL | {"DELTACHAIN_STRICT": "No"}, False),
        (URL | {"DELTACHAIN_STRICT": "very", "DELTACHAIN_POLL_S": "often"}, True),
    ],
)
def test_who_names_a_chain_is_strict(environment: dict[str, str], strict: bool) -> None:
    assert is_strict(environment) is strict


def test_what_kubernetes_tells_of_a_service_is_nobodys_setting() -> None:
    told = {
        "DELTACHAIN_SERVICE_HOST": "10.0.0.1",
        "DELTACHAIN_SERVICE_PORT": "8000",
        "DELTACHAIN_SERVICE_PORT_HTTP": "8000",
        "DELTACHAIN_PORT": "tcp://10.0.0.1:8000",
        "DELTACHAIN_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "DELTACHAIN_PORT_8000_TCP_ADDR": "10.0.0.1",
        "DELTACHAIN_ROLLOUT_SERVICE_HOST": "10.0.0.2",
    }
    assert read(told | URL) == {"URL": URL["DELTACHAIN_URL"]}


def test_a_line_break_is_no_part_of_a_token() -> None:
    assert read({"DELTACHAIN_TOKEN": "a b\n"}) == {"TOKEN": "a b"}


def test_every_variable_that_code_or_documents_name_is_known() -> None:
    folders = ["deltachain", "docs", "vllm_ext", "sglang_ext", "spaces", "examples"]
    files = [ROOT / "README.md"]
    for folder in (*folders, "tests/engines"):
        files += (ROOT / folder).rglob("*")
    named = set()
    for file in files:
        if file.suffix in (".py", ".md", ".sh", ".ipynb"):
            named |= set(re.findall(r"\bDELTACHAIN_[A-Z_]*[A-Z]\b", file.read_text()))
    assert {name.removeprefix(PREFIX) for name in named} <= VARIABLES.keys()
