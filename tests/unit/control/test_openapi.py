"""The routes do what their documents say, whatever is sent to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings

from deltachain.control.routes import router
from tests.unit.control.replicas import app_of, followed, leader_of

TOKEN = "one that nobody guesses"  # noqa: S105
PATHS = [route.path for route in router.routes if isinstance(route, APIRoute)]


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_is_one_that_the_documents_name(tmp_path: Path, path: str) -> None:
    for here in followed(tmp_path):
        for leader in leader_of(here):
            leader.update()
            _try(app_of(leader, token=TOKEN), path)


def _try(app: Any, path: str) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    (found,) = schema.include(path=f"/v1/deltachain{path}").get_all_operations()
    operation: Any = found

    @given(case=operation.ok().as_strategy())
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        case.call_and_validate(headers={"authorization": f"Bearer {TOKEN}"})

    ask()
