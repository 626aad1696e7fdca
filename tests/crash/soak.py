"""Soak: a chain that is published, maintained, mirrored and followed for hours.

::

    python -m tests.crash.soak --minutes 120 --folder soak

Commits a version every 100 ms. Samples memory and open files of each process every ten seconds
into ``samples.jsonl`` in the folder, prints a line a minute, and ends with totals. Started again
with the same folder it goes on, and the minutes of all runs count. Ctrl-C ends it; nothing is lost.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any, Final

from deltachain.chain.chain import Chain
from deltachain.store import open_store

SAMPLE_S: Final = 10.0
VERSION_S: Final = 0.1
GRACE_S: Final = 60.0
KEPT: Final = 512
WARM_UP: Final = 12_000
"""Versions of a run until which memory may still grow.

A model as small as this one gets its first anchor after some 8,800 versions. Until then most
deltas are kept, and what a process holds grows with what is kept.
"""

MOST_GROWTH: Final = 0.1
"""Largest growth of a process's memory after that, as a share."""

MOST_FILES: Final = 2
"""Largest growth of its open files."""

LEAST_SAMPLES: Final = 12
"""Samples after the warm-up without which growth cannot be told."""


def stopping() -> Event:
    stop = Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    return stop


def publish(url: str) -> None:
    from deltachain.publish import PublishConfig, Publisher  # noqa: PLC0415 - in the child
    from tests.support.models import TinyModel, train_  # noqa: PLC0415

    stop, model = stopping(), TinyModel(width=64)
    with Publisher(PublishConfig(url=url, when_busy="wait", on_error="warn")).attach(
        model
    ) as chain:
        step = chain.version
        while not stop.is_set():
            due, step = time.monotonic() + VERSION_S, step + 1
            train_(model, step, share=0.01)
            chain.publish(step=step)
            stop.wait(max(0.0, due - time.monotonic()))


def maintain(url: str) -> None:
    from deltachain.errors import DeltaChainError  # noqa: PLC0415
    from deltachain.maintain import KeepRule, Maintainer, Pruner  # noqa: PLC0415
    from deltachain.maintain.survey import Survey  # noqa: PLC0415

    stop = stopping()
    survey = Survey(Chain.open(open_store(url, writer=True)))
    maintainer = Maintainer(survey.chain, Pruner(survey, KeepRule(last=KEPT), grace_s=GRACE_S))
    while not stop.wait(2.0):
        try:
            maintainer.round()
        except DeltaChainError as error:
            say(f"maintain: {error}")


def mirror(url: str, other: str) -> None:
    from deltachain.cli.mirror import mirror as command  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull, "w") as quiet:  # noqa: PTH123
        sys.stdout = quiet
        command(url, other, follow=True)


def follow(url: str) -> None:
    from deltachain.subscribe import Subscriber  # noqa: PLC0415
    from tests.support.models import TinyModel, tensors_of  # noqa: PLC0415

    stop = stopping()
    with Subscriber(url, tensors_of(TinyModel(seed=1, width=64))) as subscriber:
        for _ in subscriber.follow(stop=stop):
            if stop.is_set():
                return


ROLES: Final[dict[str, Callable[..., None]]] = {
    "publisher": publish,
    "maintainer": maintain,
    "second maintainer": maintain,
    "mirror": mirror,
    "follower": follow,
    "follower of the mirror": follow,
}


def arguments_of(role: str, folder: Path) -> tuple[str, ...]:
    chain, copy = str(folder / "chain"), str(folder / "mirror")
    return {"mirror": (chain, copy), "follower of the mirror": (copy,)}.get(role, (chain,))


def measure(pid: int) -> tuple[int, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    memory = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return memory, len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208


def say(words: str) -> None:
    print(words, flush=True)  # noqa: T201 - a command


def begin(folder: Path) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    children = {}
    for role, target in ROLES.items():
        given = arguments_of(role, folder)
        children[role] = context.Process(target=target, args=given, daemon=True)
        children[role].start()
        while role in ("publisher", "mirror") and not (Path(given[-1]) / "head.json").exists():
            time.sleep(0.2)
    return children


def end(children: Mapping[str, Any]) -> None:
    for child in children.values():
        child.terminate()
    for child in children.values():
        child.join(30)


def sample(folder: Path, children: Mapping[str, Any]) -> dict[str, Any]:
    store = open_store(str(folder / "chain"))
    chain = Chain.open(store)
    head = chain.head()
    return {
        "head": head.version if head else -1,
        "processes": {role: measure(child.pid or 0) for role, child in children.items()},
        "nbytes": sum(info.nbytes for info in store.list()),
    }


def run(folder: Path, minutes: float) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    samples = folder / "samples.jsonl"
    lines = samples.read_text(encoding="utf-8").splitlines() if samples.exists() else []
    before = [json.loads(line) for line in lines]
    spent = max((one["minutes"] for one in before), default=0.0)
    number = max((one["run"] for one in before), default=-1) + 1
    children, start, found = begin(folder), time.monotonic(), list[dict[str, Any]]()
    try:
        while spent + (time.monotonic() - start) / 60 < minutes:
            time.sleep(SAMPLE_S)
            dead = [role for role, child in children.items() if not child.is_alive()]
            if dead:
                say(f"ended by itself: {', '.join(dead)}")
                return 1
            seconds = time.monotonic() - start
            when = {"run": number, "minutes": spent + seconds / 60, "seconds": seconds}
            found.append(when | sample(folder, children))
            with samples.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found[-1]) + "\n")
            if len(found) % 6 == 0:
                row = found[-1]
                say(f"{row['minutes']:6.1f} min  version {row['head']:,}  {row['nbytes']:,} B")
    except KeyboardInterrupt:
        say("interrupted: started again, it goes on")
    finally:
        end(children)
    return report(found)


def report(found: list[dict[str, Any]]) -> int:
    warm = [row for row in found if row["head"] >= max(0, found[0]["head"]) + WARM_UP]
    if len(warm) < LEAST_SAMPLES:
        say("too short to tell growth: let it run on for an hour at least")
        return 0
    quarter, grew = len(warm) // 4, False
    for role in ROLES:
        memory, files = ([row["processes"][role][n] for row in warm] for n in (0, 1))
        m0, m1, f0, f1 = (
            median(part) for line in (memory, files) for part in (line[:quarter], line[-quarter:])
        )
        bad = m1 > m0 * (1 + MOST_GROWTH) or f1 > f0 + MOST_FILES
        grew = grew or bad
        grown = "  GREW" if bad else ""
        say(f"{role:24}{m0 / 1024:8.1f} -> {m1 / 1024:.1f} MiB  {f0:.0f} -> {f1:.0f} files{grown}")
    first, last = warm[0], warm[-1]
    rate = (last["head"] - first["head"]) / (last["seconds"] - first["seconds"])
    say(f"{last['head']:,} versions, {rate:.1f} a second")
    say(f"store {first['nbytes']:,} -> {last['nbytes']:,} B")
    return int(grew)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--folder", type=Path, default=Path("soak"))
    given = parser.parse_args()
    raise SystemExit(run(given.folder, given.minutes))
