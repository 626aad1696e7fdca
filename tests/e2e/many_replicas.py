"""``python -m tests.e2e.many_replicas FOLDER COUNT``: statuses of many replicas of one chain."""

import random
import sys
from threading import Thread
from time import sleep
from typing import Final

import msgspec
from fastapi import FastAPI, Response

from deltachain.chain.chain import Chain
from deltachain.status import Status
from deltachain.store import open_store
from deltachain.types import Version
from spaces.dashboard.watcher import REPLICA_PHASES
from tests.unit.control.replicas import served, status

BEHIND: Final = 3
CUT_OFF: Final = 40
LOOK_S: Final = 0.2


class Followers:
    def __init__(self, folder: str) -> None:
        self._chain = Chain.open(open_store(folder))
        self._digests: dict[Version, str] = {}
        self.head = 0
        self.look()

    def look(self) -> None:
        head = self._chain.newest(self.head) or 0
        for version in range(max(head - BEHIND, 0), head + 1):
            if version not in self._digests:
                self._digests[version] = self._chain.read(version).digest
        self.head = head

    def status(self, number: int) -> Status:
        """Return what a replica answers."""
        is_cut = number % CUT_OFF == 0
        version = max(self.head - number % BEHIND, 0)
        times = random.Random(version * 1000 + number)
        return status(
            version,
            url=self._chain.store.url,
            chain=self._chain.identity.chain,
            manifest=self._digests[version],
            head=self.head,
            lag_versions=self.head - version,
            last={"version": version},
            phases={name: times.lognormvariate(-3, 1) for name in REPLICA_PHASES},
            ready=not is_cut,
            reason="its store has not answered for 400 s, more than 60 s" if is_cut else "",
            silence_s=400.0 if is_cut else 0.5,
            engine="vllm/0.32.0",
        )


def main(folder: str, count: int) -> None:
    followers, app = Followers(folder), FastAPI()

    @app.get("/r{number}/v1/deltachain/status")
    def answer(number: int) -> Response:
        found = followers.status(number % count)
        return Response(msgspec.json.encode(found), media_type="application/json")

    def follow() -> None:
        while True:
            followers.look()
            sleep(LOOK_S)

    Thread(target=follow, daemon=True).start()
    with served(app) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
