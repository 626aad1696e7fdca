"""Evaluation of a demo run: independent bit comparison, ``deltachain verify``, uploaded bytes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deltachain.chain.chain import Chain
from deltachain.chain.plan import edge_id
from deltachain.format.documents import Manifest
from deltachain.store import Store
from examples.demo import compare_bits
from examples.demo.follower_process import DemoError
from examples.demo.report import BitCheck, Display


@dataclass(frozen=True, slots=True)
class Sent:
    deltas: int
    anchors: int


def compare(what: str, dump: Path, held: Path) -> BitCheck:
    """Run :mod:`examples.demo.compare_bits` in a process without deltachain."""
    command = [sys.executable, compare_bits.__file__, "compare", str(dump), str(held)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if not done.stdout:
        raise DemoError(f"the bit comparison of {what} failed", hint=done.stderr.strip())
    found = json.loads(done.stdout)
    return BitCheck(
        what=what, elements=found["elements"], mismatching_bits=found["mismatching_bits"]
    )


def verify(url: str, environment: Mapping[str, str], display: Display) -> bool:
    program = "from deltachain.cli import main; main()"
    command = [sys.executable, "-c", program, "verify", url, "--json"]
    done = subprocess.run(  # noqa: S603
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    if done.returncode != 0:
        display.say(f"[red]deltachain verify: {done.stderr.strip()}")
    return done.returncode == 0


def manifests_in(store: Store) -> list[Manifest]:
    chain = Chain.open(store)
    head = chain.head()
    if head is None:
        raise DemoError("the chain is empty")
    return [committed.manifest for committed in chain.history(0, head.version)]


def sent(manifests: Iterable[Manifest]) -> Sent:
    listed = [edge for m in manifests for edge in (*m.recent, m.summary())]
    edges = {edge_id(edge): edge for edge in listed}.values()
    return Sent(
        deltas=sum(edge.nbytes for edge in edges if edge.kind == "delta"),
        anchors=sum(edge.nbytes for edge in edges if edge.kind == "anchor"),
    )
