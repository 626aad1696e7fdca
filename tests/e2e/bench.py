"""``python -m tests.e2e.bench``: the dashboard of 10,000 versions and 200 replicas, in Chromium.

Opening it is compared with a floor: a page that loads the same files and documents, compressed as
they were, and does nothing with them. Both are opened in turn.
"""

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
from fastapi import FastAPI, Response

from deltachain.chain.chain import Chain, Committed
from deltachain.format.documents import Edge, ObjectRef, phases_mark
from deltachain.format.keys import payload_key
from deltachain.store import MemoryStore, open_store
from examples.demo.online.processes import free_port
from tests.bench import report
from tests.e2e.pages import chromium
from tests.unit.control.replicas import served
from tests.unit.manifest_chains import create, manifest_after

VERSIONS: Final = 10_000
REPLICAS: Final = 200
ROUNDS: Final = 10
LIVE_S: Final = 30.0
STEP_S: Final = 1.0
PATIENCE_S: Final = 300.0
NUMEL: Final = 10**9
ANCHORS, SKIPS = 200, 50

SHOWN: Final = """
const done = () => ["density", "bytes", "phases", "track"].every((name) =>
    document.getElementById(`${name}-chart`)?.hasAttribute("aria-label"))
  && document.querySelectorAll("#version-table tbody tr").length === 20
  && document.querySelectorAll("#fleet-table tbody tr").length === %d;
const look = () => requestAnimationFrame(done()
  ? () => requestAnimationFrame(() => { window.shown = performance.now(); }) : look);
requestAnimationFrame(look);
"""

NEWEST: Final = """
window.seen = {};
const note = () => {
  const newest = document.querySelector("#facts dd")?.textContent;
  if (newest && !(newest in window.seen)) window.seen[newest] = Date.now() / 1000;
  requestAnimationFrame(note);
};
note();
"""

FLOOR: Final = """<!doctype html><title>floor</title><script>
Promise.all(%s.map((path) => fetch(path).then((answer) => answer.arrayBuffer())))
  .then(() => requestAnimationFrame(() => { window.shown = performance.now(); }));
</script>"""


def grow(chain: Chain, parent: Committed | None, dice: random.Random) -> Committed:
    version = parent.version + 1 if parent else 0
    density = 1.0 if parent is None else min(dice.lognormvariate(-4.5, 0.4), 1.0)
    kind = "delta" if parent else "anchor"
    encode_s = dice.lognormvariate(-1, 0.3)
    phases = {"diff": dice.lognormvariate(-3, 0.3), "encode": encode_s, "upload": 0.8 * encode_s}
    edge = _edge(kind, version, version - 1 if parent else None, int(NUMEL * density * 1.3))
    committed = chain.commit(
        manifest_after(
            parent,
            edge=edge,
            epoch=version // 2500,
            time=time.time() - 60.0 * max(VERSIONS - version, 0),
            nnz=int(NUMEL * density),
            numel=NUMEL,
            ext=phases_mark(phases),
        )
    )
    if version and version % ANCHORS == 0:
        chain.add_edge(committed, _edge("anchor", version, None, NUMEL), "")
    if version and version % SKIPS == 0:
        skip = _edge("skip", version, version - SKIPS, NUMEL // 10)
        chain.add_edge(committed, skip, chain.read(version - SKIPS).manifest.state)
    return committed


def _edge(kind: Any, version: int, base: int | None, nbytes: int) -> Edge:
    key = payload_key(kind, version, 0, f"commit-{version}", 0)
    part = ObjectRef(key=key, nbytes=nbytes, blake3="0" * 64)
    encoding = "dense" if kind == "anchor" else "step"
    return Edge(kind=kind, base=base, encodings=(encoding,), parts=(part,))


def make_chain(folder: Path, versions: int) -> tuple[Chain, Committed]:
    store, dice, head = MemoryStore(), random.Random(0), None
    made = create(store)
    for _ in range(versions):
        head = grow(made, head, dice)
    assert head is not None
    made.write_head(head.version, ())
    for info in store.list():
        path = folder / info.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(info.key))
    chain = Chain.open(open_store(str(folder)))
    return chain, chain.read(head.version)


@contextmanager
def replicas(folder: Path, count: int) -> Iterator[list[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.many_replicas", str(folder), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        url = process.stdout.readline().strip()
        yield [f"{url}/r{number}" for number in range(count)]
        process.stdin.close()


@contextmanager
def dashboard(folder: Path, engines: Sequence[str]) -> Iterator[tuple[str, int]]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "spaces.dashboard", str(folder), "--listen", str(port)],
        env=os.environ | {"DELTACHAIN_ENGINES": ",".join(engines)},
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        limit = time.monotonic() + PATIENCE_S
        while not _is_ready(url):
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.5)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)


def _is_ready(url: str) -> bool:
    try:
        found = httpx.get(f"{url}/api/overview", timeout=PATIENCE_S, trust_env=False).json()
    except httpx.TransportError:
        return False
    asked = all(one["answered_at"] is not None for one in found["replicas"])
    return asked and found["chain"]["found"] == found["chain"]["indexed"] > 0


@dataclass(frozen=True)
class Opening:
    shown_ms: float
    cpu_ms: float
    paths: Sequence[str]


def opened_in(browser: Any, url: str, script: str = "") -> Opening:
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    paths: list[str] = []
    page.on("response", lambda answer: paths.append(answer.url.removeprefix(url).lstrip("/")))
    page.add_init_script(script)
    session = _profiled(page)
    before = _metrics(session)["TaskDuration"]
    page.goto(url)
    shown = _value(page, "window.shown")
    cpu_s = _metrics(session)["TaskDuration"] - before
    context.close()
    return Opening(shown, 1e3 * cpu_s, list(dict.fromkeys(paths)))


def _value(page: Any, expression: str) -> float:
    limit = time.monotonic() + PATIENCE_S
    while not (found := page.evaluate(expression)):
        assert time.monotonic() < limit
        page.wait_for_timeout(20)
    value: float = found
    return value


@contextmanager
def floor(url: str, paths: Sequence[str]) -> Iterator[tuple[str, int]]:
    app, bodies = FastAPI(), {}
    with httpx.Client(trust_env=False, timeout=PATIENCE_S) as client:
        for path in paths:
            with client.stream("GET", f"{url}/{path}") as answer:
                encoding = answer.headers.get("content-encoding", "identity")
                headers = {"content-encoding": encoding, "cache-control": "no-store"}
                bodies[path] = Response(b"".join(answer.iter_raw()), headers=headers)

    @app.get("/{path:path}")
    def answer_(path: str) -> Response:
        if path == "floor":
            return Response(FLOOR % json.dumps(list(paths)), media_type="text/html")
        return bodies.get(path) or Response(status_code=404)

    with served(app) as address:
        yield f"{address}/floor", sum(len(body.body) for body in bodies.values())


def live(
    browser: Any, url: str, pid: int, chain: Chain, head: Committed, live_s: float
) -> dict[str, float]:
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    page.goto(url)
    page.locator("#fleet-table tbody tr").first.wait_for()
    page.evaluate(NEWEST)
    session = _profiled(page)
    dice, committed = random.Random(1), {}
    start, before, cpu = time.monotonic(), _metrics(session), _cpu_s(pid)
    while time.monotonic() - start < live_s:
        head = grow(chain, head, dice)
        committed[str(head.version)] = time.time()
        page.wait_for_timeout(1e3 * STEP_S)
    after, wall = _metrics(session), time.monotonic() - start
    server = _cpu_s(pid) - cpu
    _value(page, f"window.seen['{head.version}']")
    seen = page.evaluate("window.seen")
    context.close()
    late = [seen[version] - at for version, at in committed.items() if version in seen]
    return {
        "page_share": (after["TaskDuration"] - before["TaskDuration"]) / wall,
        "server_share": server / wall,
        "late_s": median(late),
    }


def _profiled(page: Any) -> Any:
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    return session


def _metrics(session: Any) -> Mapping[str, float]:
    found = session.send("Performance.getMetrics")["metrics"]
    return {one["name"]: one["value"] for one in found}


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(versions: int, count: int, rounds: int, live_s: float = LIVE_S) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        chain, head = make_chain(folder, versions)
        engines = stack.enter_context(replicas(folder, count))
        url, pid = stack.enter_context(dashboard(folder, engines))
        browser = stack.enter_context(chromium())
        paths = opened_in(browser, url, SHOWN % count).paths
        floor_url, nbytes = stack.enter_context(floor(url, paths))
        pages, floors = [], []
        for _ in range(rounds):
            pages.append(opened_in(browser, url, SHOWN % count))
            floors.append(opened_in(browser, floor_url))
        return {
            "versions": versions,
            "replicas": count,
            "bytes": nbytes,
            **{f"open_{name}": value for name, value in _best(pages).items()},
            **{f"floor_{name}": value for name, value in _best(floors).items()},
            **live(browser, url, pid, chain, head, live_s),
        }


def _best(openings: Sequence[Opening]) -> dict[str, float]:
    shown, cpu = (min(getattr(one, name) for one in openings) for name in ("shown_ms", "cpu_ms"))
    return {"ms": shown, "cpu_ms": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--versions", type=int, default=VERSIONS)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="times each page is opened")
    asked = parser.parse_args()
    found = measure(asked.versions, asked.replicas, asked.rounds)
    title = f"{asked.versions:,} versions, {asked.replicas} replicas, {found['bytes'] / 1e3:.0f} kB"
    table = report.grid(title, "best", "ms", "ms of its main thread")
    for name in ("open", "floor"):
        table.add_row(name, *(f"{found[f'{name}_{unit}']:.0f}" for unit in ("ms", "cpu_ms")))
    running = report.grid("A version each second", "", "")
    running.add_row("page's main thread, of a core", f"{found['page_share']:.1%}")
    running.add_row("server, of a core", f"{found['server_share']:.1%}")
    running.add_row("a version is shown after, s", f"{found['late_s']:.1f}")
    report.emit({"machine": report.machine(), **found}, [table, running], json_output=asked.json)


if __name__ == "__main__":
    main()
