from __future__ import annotations

from pathlib import Path

from deltachain.replica.settings import ReplicaSettings, spool_folder
from deltachain.subscribe import SubscribeConfig

URL = {"DELTACHAIN_URL": "s3://bucket/run"}


def test_without_a_chain_there_are_no_settings() -> None:
    assert ReplicaSettings.of({}) is None
    assert ReplicaSettings.of({"DELTACHAIN_URL": "", "DELTACHAIN_FOLLOW": "1"}) is None


def test_the_defaults_are_those_of_the_subscriber() -> None:
    settings = ReplicaSettings.of(URL)
    assert settings is not None
    assert settings == ReplicaSettings(subscribe=SubscribeConfig(url="s3://bucket/run"))


def test_every_variable_is_read() -> None:
    settings = ReplicaSettings.of(
        URL
        | {
            "DELTACHAIN_BASE": "/models/base",
            "DELTACHAIN_POLL_S": "0.5",
            "DELTACHAIN_STAGE_BUDGET": "1e9",
            "DELTACHAIN_FOLLOW": "Yes",
            "DELTACHAIN_PAUSE": "wait",
            "DELTACHAIN_KEEP_CACHE": "on",
            "DELTACHAIN_TOKEN": "secret",
            "DELTACHAIN_MAX_LAG": "3",
            "DELTACHAIN_MAX_SILENCE_S": "60",
            "DELTACHAIN_STRICT": "off",
            "DELTACHAIN_TRUSTED_KEYS": "trusted.txt",
            "OTHER": "x",
        }
    )
    assert settings == ReplicaSettings(
        subscribe=SubscribeConfig(
            url="s3://bucket/run",
            base=Path("/models/base"),
            poll_s=0.5,
            stage_budget=10**9,
            trusted_keys="trusted.txt",
        ),
        follow=True,
        strict=False,
        pause="wait",
        keep_cache=True,
        token="secret",  # noqa: S106
        max_lag=3,
        max_silence_s=60.0,
    )


def test_the_spool_is_named_or_the_users_own() -> None:
    assert spool_folder({"DELTACHAIN_SPOOL": "/spools"}) == Path("/spools")
    assert spool_folder({}) == spool_folder({"DELTACHAIN_SPOOL": ""})
    assert spool_folder({}).name.startswith("deltachain-")
