"""The command line: options and output.

Commands import their dependencies when they run, so that ``deltachain --help`` is fast.
"""

import sys

from deltachain.cli.console import print_in_any_encoding, say_interrupted

__all__ = ["main"]


def main() -> None:
    print_in_any_encoding()
    try:
        from deltachain.cli.app import app  # here: handles Ctrl-C during imports too

        app()
    except KeyboardInterrupt:
        say_interrupted()
        sys.exit(130)
