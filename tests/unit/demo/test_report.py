"""The demo's tables."""

from __future__ import annotations

import io

from rich.console import Console

from examples.demo.report import DemoReport, VersionRow


def test_no_column_is_cut_at_80_columns() -> None:
    row = VersionRow(
        version=1234,
        step=1234,
        density=0.12345,
        nbytes=12_345_678,
        requests=4,
        ratio=123.0,
        stage_ms=1234.5,
        swap_ms=123.45,
        lag_versions=12,
        staleness_s=123.45,
    )
    report = DemoReport(
        versions=1,
        mismatching_bits=0,
        bytes_sent=1,
        anchor_bytes=1,
        bytes_dense=1,
        late_joiner_bytes=1,
        late_joiner_plan="",
        verified=True,
        seconds=1.0,
        parameters=1,
        rows=(row,),
        judged=(),
        texts={},
    )
    out = io.StringIO()
    report.print(Console(file=out, width=80))
    assert "…" not in out.getvalue()
    for shown in ("age s", "123.45", "12,345,678", "stage ms", "swap ms"):
        assert shown in out.getvalue()
