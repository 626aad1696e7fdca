"""The command line: wiring only. What it does is done by the layers below it.

Each command imports what it needs when it runs, so that ``deltachain --help`` answers at once.
"""

from __future__ import annotations

import sys

from deltachain.cli.console import say_interrupted

__all__ = ["main"]


def main() -> None:
    """Run ``deltachain``; ends the process with the exit code of what went wrong, or 0."""
    try:
        from deltachain.cli.app import app  # noqa: PLC0415 - Ctrl-C while importing is answered too

        app()
    except KeyboardInterrupt:
        say_interrupted()
        sys.exit(130)
