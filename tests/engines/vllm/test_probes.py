"""Probes beside vLLM's own check of its API key."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from deltachain.control.server import Control
from deltachain_vllm.endpoint import EndpointPlugin

pytestmark = pytest.mark.engine


def test_probes_need_no_key_where_routes_do() -> None:
    from vllm.entrypoints.serve.middleware.authenticate import (  # noqa: PLC0415
        AuthenticationMiddleware,
    )

    app = FastAPI()
    EndpointPlugin().attach_router(app)
    app.state.deltachain = Control(None, "nothing", token="", is_open=False, is_guarded=True)
    app.add_middleware(AuthenticationMiddleware, tokens=["key"])
    with TestClient(app) as client:
        assert client.get("/healthz/deltachain").status_code == 200
        assert client.get("/readyz/deltachain").status_code == 503
        assert client.get("/v1/deltachain/healthz").status_code == 401
        key = {"Authorization": "Bearer key"}
        assert client.get("/v1/deltachain/healthz", headers=key).status_code == 200
