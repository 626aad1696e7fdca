from dataclasses import replace
from typing import Any

import pytest

from deltachain.chain.chain import Chain
from deltachain.dashboard.watcher import AlertKind, ReplicaReport, alerts, answered, newest_known
from deltachain.format.keys import manifest_key
from deltachain.redact import LONGEST
from deltachain.status import HealthLimits
from tests.unit.dashboard.reports import ENGINE, NOW, chain_of, report, status, view_of

LIMITS = HealthLimits(lag=2, silence_s=30.0)


@pytest.fixture(scope="module")
def chain() -> Chain:
    return chain_of(6)


def kinds(chain: Chain, *reports: ReplicaReport) -> list[str]:
    return [alert.kind.value for alert in alerts(view_of(chain), reports, LIMITS, NOW)]


def test_a_replica_in_order_is_no_alert(chain: Chain) -> None:
    assert kinds(chain, report(chain, 5), report(chain, 3)) == []


@pytest.mark.parametrize(
    ("version", "changes", "expected"),
    [
        (2, {}, ["behind"]),
        (5, {"ready": False, "reason": "paused"}, ["not ready"]),
        (5, {"silence_s": 31.0}, ["cut off"]),
        (5, {"silence_s": 31.0, "following": False}, []),  # versions are announced to it
        (5, {"silence_s": 31.0, "pinned": True}, []),
        (2, {"silence_s": 31.0, "ready": False}, ["cut off", "not ready", "behind"]),
        (5, {"chain": "two"}, ["another chain"]),
        (5, {"manifest": "0" * 64}, ["another chain"]),
        (9, {}, ["another chain"]),
        (5, {"head": 9}, ["another chain"]),
        (None, {"ready": False, "chain": None, "head": None}, ["not ready"]),
    ],
)
def test_each_thing_that_is_wrong_is_named(
    chain: Chain, version: int | None, changes: dict[str, Any], expected: list[str]
) -> None:
    found = alerts(view_of(chain), [report(chain, version, **changes)], LIMITS, NOW)
    assert [alert.kind.value for alert in found] == expected
    assert all(alert.engine == ENGINE and alert.message for alert in found)


def test_a_replica_that_does_not_answer_is_silent(chain: Chain) -> None:
    assert kinds(chain, ReplicaReport(engine=ENGINE)) == []  # not asked yet
    assert kinds(chain, ReplicaReport(engine=ENGINE, trouble="refused")) == ["silent"]
    assert kinds(chain, replace(report(chain, 5), trouble="refused")) == ["silent"]
    hanging = replace(report(chain, 5), answered_at=NOW - 31)
    assert kinds(chain, hanging) == ["silent"]


def test_a_version_committed_after_the_last_look_is_no_lie(chain: Chain) -> None:
    ahead = answered(ENGINE, status(chain, 5, head=9), NOW + 1)
    assert kinds(chain, ahead) == ["behind"]  # for the newest version is that which anybody saw
    assert newest_known(view_of(chain), [ahead]) == 9


def test_a_lie_does_not_make_others_late(chain: Chain) -> None:
    liar = replace(report(chain, 5, head=10**9), engine="http://liar")
    assert newest_known(view_of(chain), [liar, report(chain, 5)]) == 5
    assert kinds(chain, liar, report(chain, 5)) == ["another chain"]


def test_lost_manifests_and_stores_are_alerts_of_the_chain() -> None:
    chain = chain_of(6)
    chain.store.delete(manifest_key(3))
    view = view_of(chain)
    found = alerts(replace(view, trouble="no answer"), [], LIMITS, NOW)
    assert [alert.kind for alert in found] == [AlertKind.STORE, AlertKind.HISTORY]
    assert "versions 3" in found[1].message


def test_answers_are_cut_and_out_of_range_numbers_unknown(chain: Chain) -> None:
    wild = report(chain, 5, reason="\x1b[31m" + "x" * 10_000, head=10**30, silence_s=float("inf"))
    assert len(wild.status.reason) == LONGEST + 1
    assert "\x1b" not in wild.status.reason
    assert (wild.status.head, wild.status.silence_s) == (None, None)
