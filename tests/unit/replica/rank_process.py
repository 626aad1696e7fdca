"""A rank of a fake engine in a process of its own, asked by lines of its standard input.

``python -m tests.unit.replica.rank_process NUMBER TP CHECKPOINT SPOOL FAULT``: ``kill`` ends the
process with SIGKILL at the second object it fetches, ``fail`` lets that fetch fail, ``none`` does
neither.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from deltachain.chain.part import fetch_part
from deltachain.errors import StoreUnavailableError
from deltachain.replica import fetcher
from deltachain.replica.rpc import RankService
from deltachain.replica.settings import RankSettings
from deltachain.testing.engine import FakeModel
from deltachain.testing.sharding import Sharding


def main() -> None:
    """Answer every line with one, until the input ends."""
    number, tp, checkpoint, spool, fault = sys.argv[1:]
    model = FakeModel(Sharding(tp=int(tp)), int(number), Path(checkpoint))
    service = RankService(lambda: model, int(number), RankSettings(spool=Path(spool)))
    fetched = 0

    def faulty(*arguments: Any) -> Any:
        nonlocal fetched
        fetched += 1
        if fetched == 2 and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fetched >= 2 and fault == "fail":
            raise StoreUnavailableError("the bucket is out of reach")
        return fetch_part(*arguments)

    vars(fetcher)["fetch_part"] = faulty
    for line in sys.stdin:
        sys.stdout.write(service.answer(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
