"""The one rule of health, and the alert rules of Prometheus that must agree with it."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from deltachain.status import Health, HealthLimits, Status, complaints, judged
from tests.unit.control.statuses import status

ALERTS: Final = Path(__file__).parents[2] / "examples" / "deploy" / "prometheus" / "alerts.yml"

RULES: Final[Mapping[str, Health]] = {
    "ReplicaNotReady": "not ready",
    "StoreSilent": "cut off",
    "ReplicaBehind": "stale",
    "WeightsUnknown": "poisoned",
}
"""Alert rules about a single replica, and the health that each tells."""

LIMITS: Final = HealthLimits(lag=4)

COMPARED: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "==": operator.eq,
    ">": operator.gt,
}

MORE: Final[Sequence[dict[str, Any]]] = (
    {},
    {"silence_s": 60.0},
    {"silence_s": 61.0},
    {"ready": False, "reason": "paused"},
)

STATUSES: Final = [
    status(version, head=7, following=following, pinned=pinned, poisoned=poisoned, **more)
    for version in (7, 3, 2, None)
    for following, pinned, poisoned in product((True, False), repeat=3)
    for more in MORE
]


def figures_of(one: Status) -> dict[str, float]:
    """The figures of a replica that rules read, as a replica gives them."""
    lag = None if one.version is None or one.head is None else one.head - one.version
    silence_s = one.silence_s if one.following else None
    found = {
        "deltachain_ready": float(one.ready),
        "deltachain_poisoned": float(one.poisoned),
        "deltachain_pinned": float(one.pinned),
        "deltachain_lag_versions": lag,
        "deltachain_silence_seconds": silence_s,
    }
    return {name: value for name, value in found.items() if value is not None}


def fires(expression: str, found: Mapping[str, float]) -> bool:
    """Evaluate a comparison, but for an exception after ``unless``."""
    rule, _, exception = expression.partition(" unless on (instance) ")
    match = re.fullmatch(r"(\w+) (==|>) (\d+)", rule)
    assert match is not None, rule
    name, compared, number = match.groups()
    holds = name in found and COMPARED[compared](found[name], float(number))
    return holds and not (exception and fires(exception, found))


@pytest.mark.parametrize("name", RULES)
def test_an_alert_rule_fires_where_the_rule_of_health_complains(name: str) -> None:
    rules: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    (expression,) = (one["expr"] for one in rules if one.get("alert") == name)
    told = [
        (one, any(health == RULES[name] for health, _ in complaints(one, LIMITS)))
        for one in STATUSES
    ]
    assert {complains for _, complains in told} == {True, False}
    for one, complains in told:
        assert fires(expression, figures_of(one)) == complains, one


@pytest.mark.parametrize(
    ("found", "waits", "reason"),
    [
        (status(), "", ""),
        (status(), "paused", "paused"),
        (status(fault="the engine is dead"), "paused", "the engine is dead"),
        (status(poisoned=True, doubt="lost"), "paused", "poisoned: it cannot prove what it holds"),
        (status(doubt="the store went back"), "paused", "paused"),
        (status(doubt="the store went back"), "", "the store went back"),
        (status(2, head=7), "", "5 versions behind"),
        (status(2, head=7, pinned=True), "", ""),
        (status(3, head=7), "", ""),
        (status(silence_s=61.0), "", "its store has not answered for 61 s, more than 60 s"),
        (status(silence_s=61.0, following=False), "", ""),
    ],
)
def test_the_readiness_of_a_replica(found: Status, waits: str, reason: str) -> None:
    one = judged(found, LIMITS, waits)
    assert (one.ready, one.reason) == (not reason, reason)
