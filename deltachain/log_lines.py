"""Lines of deltachain in the log of an engine: each has its name, to be searched for."""

import copy
import logging
from typing import Final

NAME: Final = "deltachain"

LOGGERS: Final = (NAME, "deltachain_vllm", "deltachain_sglang")


def show(through: logging.Logger, level: int) -> None:
    for name in LOGGERS:
        ours = logging.getLogger(name)
        if not ours.handlers:
            ours.addHandler(_Named(through))
            ours.setLevel(level)
            ours.propagate = False


class _Named(logging.Handler):
    def __init__(self, through: logging.Logger) -> None:
        super().__init__()
        self._through = through

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        named = copy.copy(record)
        named.msg = message if message.startswith(NAME) else f"{NAME}: {message}"
        named.args = None
        self._through.callHandlers(named)
