"""The benchmark of the dashboard, apart from other tests in a browser: it opens one of its own."""

from __future__ import annotations

import pytest

from tests.e2e.bench import measure
from tests.e2e.pages import CHROMIUM


@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed: apt-get install chromium")
def test_the_benchmark_opens_a_page_and_sees_it_live() -> None:
    found = measure(versions=60, count=8, rounds=1, live_s=2.0)
    for page in ("open", "floor"):
        assert found[f"{page}_ms"] > 0
        assert found[f"{page}_cpu_ms"] > 0
    assert found["late_s"] > 0
