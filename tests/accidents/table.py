"""The table of accidents, from a real run: ``python -m tests.accidents.table``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import tests.conftest  # noqa: F401 - sets what the client of the Hub reads when it is imported
from deltachain.chain import commits
from tests.accidents.case import FATES, Case, Fate
from tests.accidents.happenings import FAR, HAPPENINGS
from tests.crash.places import KINDS, open_place


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("accidents", nargs="*", help="parts of their names")
    parser.add_argument("--stores", default=",".join(KINDS))
    parser.add_argument("--fates", default=",".join(FATES))
    parser.add_argument("--backup", action="store_true", help="a person has a copy of the store")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    commits.AGAIN_S = 0.0  # type: ignore[misc]
    broken = 0
    _write("accident", "store", "publisher", "followers", "publisher says", "newcomers", "way out")
    _write(*["---"] * 7)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for kind in options.stores.split(","):
            server = _server(kind, folder / "server", stack)
            for accident, fate in _chosen(options.accidents, options.fates.split(",")):
                here = Path(tempfile.mkdtemp(dir=folder))
                (here / "followers").mkdir()
                url = open_place(kind, here, lambda _, it=server: it, _setenv).url()  # type: ignore[misc]
                case = Case(url, here / "followers", accident, fate, has_backup=options.backup)
                case.versions = 1010 if accident in FAR else case.versions
                broken += not _row(case, kind)
    return min(broken, 1)


def _chosen(names: list[str], fates: list[str]) -> Iterator[tuple[str, Fate]]:
    for accident in HAPPENINGS:
        if not names or any(name in accident for name in names):
            for fate in FATES:
                if fate in fates:
                    yield accident, fate


def _server(kind: str, folder: Path, stack: ExitStack) -> object:
    if kind == "s3":
        from tests.support.seaweed import Seaweed  # noqa: PLC0415

        return stack.enter_context(Seaweed(folder / kind))
    if kind == "hf":
        from tests.support.hub.server import HubServer  # noqa: PLC0415

        return stack.enter_context(HubServer(folder / kind))
    return None


def _setenv(name: str, value: str) -> None:
    os.environ[name] = value


def _row(case: Case, kind: str) -> bool:
    start = time.perf_counter()
    faults = case.run()
    said = [", ".join(sorted(case.outcome[who])) for who in ("followers", "publisher", "newcomers")]
    done = ", ".join(case.done) or "none needed"
    _write(case.accident, kind, case.fate, *said, done)
    took = time.perf_counter() - start
    for fault in faults:
        sys.stderr.write(f"    BROKEN ({took:.1f} s): {fault}\n")
    return not faults


def _write(*cells: str) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
