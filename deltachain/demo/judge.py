"""Who judges a demo: the oracle, ``deltachain verify`` and the chain itself, each from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deltachain.chain.chain import Chain
from deltachain.chain.recent_edges import edge_id
from deltachain.demo import oracle
from deltachain.demo.display import Display
from deltachain.demo.replica import DemoError
from deltachain.demo.report import Judged
from deltachain.format.documents import Manifest
from deltachain.store import Store


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes of a chain: of its deltas, and of its anchors."""

    deltas: int
    anchors: int


def compare(what: str, dump: Path, held: Path) -> Judged:
    """Have the oracle compare, in a process that does not know deltachain.

    Args:
        what: Name of it, for people.
        dump: The trainer's bits.
        held: A checkpoint folder.

    Raises:
        DemoError: It could not.
    """
    command = [sys.executable, oracle.__file__, "compare", str(dump), str(held)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if not done.stdout:
        raise DemoError(f"the oracle could not compare {what}", hint=done.stderr.strip())
    found = json.loads(done.stdout)
    return Judged(what=what, elements=found["elements"], mismatching_bits=found["mismatching_bits"])


def verify(url: str, environment: Mapping[str, str], display: Display) -> bool:
    """Run ``deltachain verify`` as anybody would, and show what it finds wrong."""
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
    """Every manifest of a chain, oldest first.

    Raises:
        DemoError: There is none.
    """
    chain = Chain.open(store)
    head = chain.head()
    if head is None:
        raise DemoError("the chain is empty")
    return [committed.manifest for committed in chain.history(0, head.version)]


def sent(manifests: Iterable[Manifest]) -> Sent:
    """What was uploaded for these versions, anchors and squashes that came later with them."""
    listed = [edge for m in manifests for edge in (*m.recent, m.summary())]
    edges = {edge_id(edge): edge for edge in listed}.values()
    return Sent(
        deltas=sum(edge.nbytes for edge in edges if edge.kind == "delta"),
        anchors=sum(edge.nbytes for edge in edges if edge.kind == "anchor"),
    )
