"""The routes do what their documents say, whatever is sent to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from deltachain.control.routes import router
from tests.unit.control.replicas import app_of, followed, leader_of

TOKEN = "one that nobody guesses"  # noqa: S105
DOCUMENTED = [route for route in router.routes if isinstance(route, APIRoute)]
PATHS = [route.path for route in DOCUMENTED]
PROBES = ("/healthz", "/readyz")
VERSIONED = ("/stage", "/update", "/rollback")
"""Routes that take a version: what else can be sent to them is known to their documents."""

ASKS = [(path, GenerationMode.POSITIVE) for path in PATHS]
ASKS += [(path, GenerationMode.NEGATIVE) for path in VERSIONED]


@pytest.mark.parametrize(("path", "mode"), ASKS)
def test_every_answer_is_one_that_the_documents_name(
    tmp_path: Path, path: str, mode: GenerationMode
) -> None:
    for here in followed(tmp_path):
        for leader in leader_of(here):
            leader.update()
            _try(app_of(leader, token=TOKEN), path, mode)


def _try(app: Any, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    (found,) = schema.include(path=f"/v1/deltachain{path}").get_all_operations()
    operation: Any = found
    asked: list[int] = []

    @given(case=operation.ok().as_strategy(generation_mode=mode))
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        answer = case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"})
        asked.append(answer.status_code)

    ask()
    assert asked
    if mode is GenerationMode.NEGATIVE:
        assert len(asked) > 5
        assert 422 in asked


def test_the_documents_say_that_a_token_is_asked_for() -> None:
    document = schemathesis.openapi.from_asgi("/openapi.json", app_of(None)).raw_schema
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    for path, operations in document["paths"].items():
        for operation in operations.values():
            open_to_all = path.rpartition("/v1/deltachain")[2].removesuffix("/deltachain") in PROBES
            assert operation.get("security") == (None if open_to_all else [{"token": []}])
