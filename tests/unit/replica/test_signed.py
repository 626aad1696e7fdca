"""A replica with trusted keys: it follows what they signed, and serves on when others write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deltachain.chain.trust import SigningKey
from deltachain.format.keys import CHAIN_KEY, manifest_key
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings
from tests.format.forge import dumps, enveloped
from tests.unit.replica.replicas import Followed, eventually

KEY = SigningKey.of(b"\1" * 32)

Build = Callable[..., Followed]


@pytest.fixture
def signed(followed: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Followed:
    """A replica of a chain that is signed."""
    file = tmp_path / "key"
    file.write_bytes(KEY.pem())
    monkeypatch.setenv("DELTACHAIN_SIGNING_KEY", str(file))
    return followed()


def leader_of(here: Followed, trusted: SigningKey = KEY) -> Leader:
    environment = {
        "DELTACHAIN_URL": here.store.url,
        "DELTACHAIN_POLL_S": "0.01",
        "DELTACHAIN_FOLLOW": "1",
        "DELTACHAIN_SPOOL": str(here.spool),
        "DELTACHAIN_TRUSTED_KEYS": str(trusted.public),
    }
    settings = ReplicaSettings.of(environment)
    assert settings is not None
    return Leader(settings, here.engine, store=here.faulty)


def test_a_replica_serves_on_while_an_unsigned_version_is_the_newest(signed: Followed) -> None:
    here = signed
    here.publish(1)
    leader = leader_of(here)
    try:
        leader.start()
        assert here.holds(1)
        true = manifest_key(2)
        here.faulty.down = True
        here.publish(2)
        genuine = here.store.get(true)
        payload = dumps(json.loads(genuine)["payload"])
        here.store.put(true, enveloped(payload))
        here.faulty.down = False
        leader.notify()
        eventually(lambda: "no trusted key signed it" in leader.status().trouble)
        assert (leader.status().version, leader.status().ready) == (1, True)
        assert here.holds(1)
        here.store.put(true, genuine)
        leader.notify()
        eventually(lambda: leader.status().version == 2 and not leader.status().trouble)
        assert here.holds(2)
    finally:
        leader.stop()


def test_a_replica_of_a_chain_by_another_key_never_gets_ready(signed: Followed) -> None:
    here = signed
    here.publish(1)
    leader = leader_of(here, SigningKey.of(b"\2" * 32))
    try:
        leader.start()
        eventually(lambda: f"{CHAIN_KEY}: no trusted key signed it" in leader.status().trouble)
        assert not leader.status().ready
        assert here.holds(0)
    finally:
        leader.stop()
