"""Our lines in an engine's log, whatever its format leaves out."""

from __future__ import annotations

import io
import logging

import pytest

from deltachain.log_lines import LOGGERS, show


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What an engine shows through a logger of its own, by message alone."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "level", logging.NOTSET)
    engine, text = logging.getLogger("some_engine"), io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(message)s"))
    monkeypatch.setattr(engine, "handlers", [handler])
    monkeypatch.setattr(engine, "propagate", False)
    for _ in range(2):
        show(engine, logging.INFO)
    return text


@pytest.mark.parametrize(
    ("logger", "message", "shown"),
    [
        ("deltachain.subscribe.subscriber", "version %d", "deltachain: version 7\n"),
        ("deltachain_sglang.starting", "number %d", "deltachain: number 7\n"),
        ("deltachain_vllm", "deltachain follows %d", "deltachain follows 7\n"),
    ],
)
def test_each_line_has_our_name_once(
    log: io.StringIO, logger: str, message: str, shown: str
) -> None:
    logging.getLogger(logger).info(message, 7)
    assert log.getvalue() == shown


def test_what_is_below_the_level_is_not_shown(log: io.StringIO) -> None:
    logging.getLogger("deltachain.store").debug("a request")
    assert log.getvalue() == ""


def test_a_logger_that_somebody_set_up_is_left_alone(log: io.StringIO) -> None:
    own = logging.getLogger("deltachain")
    own.handlers = [logging.NullHandler()]
    show(logging.getLogger("some_engine"), logging.INFO)
    own.info("for its own handlers")
    assert log.getvalue() == ""
