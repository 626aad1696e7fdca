"""The demo: a training process, a follower process, and an independent comparison of their bits."""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from deltachain.checkpoint import Checkpoint
from deltachain.publish import DeltaChainCallback, PublishReceipt
from deltachain.store import open_store
from deltachain.subscribe import ApplyReceipt, Subscriber
from examples.demo.backends import LOCAL, start_backend
from examples.demo.callbacks import DumpCallback
from examples.demo.evaluate import compare, manifests_in, sent, verify
from examples.demo.follower_process import DemoError, FollowerProcess
from examples.demo.pretrain import STEPS as PRETRAIN_STEPS
from examples.demo.pretrain import pretrain
from examples.demo.report import Bar, BitCheck, DemoReport, Display, VersionRow
from examples.demo.train import run_grpo


@dataclass(frozen=True, slots=True)
class Stage:
    root: Path
    url: str
    pretrain_steps: int
    steps: int
    watched: tuple[int, ...]
    display: Display


def run_demo(
    *,
    workdir: Path | None = None,
    store: str = LOCAL,
    steps: int = 20,
    json_output: bool = False,
    pretrain_steps: int = PRETRAIN_STEPS,
) -> int:
    console = Console(stderr=json_output)
    with _folder(workdir) as root, start_backend(store, root) as url:
        watched = tuple(sorted({1, max(1, steps // 2), steps}))
        report = _run(Stage(root, url, pretrain_steps, steps, watched, Display(console)))
    if json_output:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    else:
        report.print(console)
    return 0 if report.mismatching_bits == 0 and report.verified else 1


@contextmanager
def _folder(workdir: Path | None) -> Iterator[Path]:
    if workdir is None:
        with tempfile.TemporaryDirectory(prefix="deltachain-demo-") as scratch:
            yield Path(scratch)
        return
    if workdir.exists() and any(workdir.iterdir()):
        raise DemoError(f"{workdir} is not empty", hint="give an empty folder")
    workdir.mkdir(parents=True, exist_ok=True)
    yield workdir


def _run(stage: Stage) -> DemoReport:
    start = time.monotonic()
    _pretrain(stage)
    receipts, heard = _train(stage)
    newcomer = _join_late(stage)
    judged = _evaluate(stage)
    verified = verify(stage.url, {}, stage.display)
    manifests = manifests_in(open_store(stage.url))
    head, bytes_of = manifests[-1], sent(manifests)
    dense = sum(spec.nbytes for spec in Checkpoint(stage.root / "base").specs.values())
    applied = {line["version"]: line for line in heard if line["event"] == "applied"}
    return DemoReport(
        versions=head.version + 1,
        mismatching_bits=sum(one.mismatching_bits for one in judged),
        bytes_sent=bytes_of.deltas,
        anchor_bytes=bytes_of.anchors,
        bytes_dense=dense * (head.version + 1),
        late_joiner_bytes=newcomer.nbytes,
        late_joiner_plan=newcomer.plan,
        verified=verified,
        seconds=time.monotonic() - start,
        parameters=head.numel,
        rows=tuple(_row(receipt, applied[receipt.version], dense) for receipt in receipts),
        judged=judged,
        texts={f"{line['event']} {line['version']}": line["text"] for line in heard},
    )


def _pretrain(stage: Stage) -> None:
    with stage.display.phase("pretrain", stage.pretrain_steps) as bar:
        report = pretrain(
            stage.root / "base",
            steps=stage.pretrain_steps,
            progress=lambda step, _, loss: bar.at(step, f"loss {loss:.2f}"),
        )
        bar.at(stage.pretrain_steps)
    stage.display.say(
        f"  a Qwen3 of {report.parameters:,} parameters read {report.tokens:,} tokens: "
        f"loss {report.loss_start:.2f} to {report.loss_end:.2f}"
    )


def _train(stage: Stage) -> tuple[list[PublishReceipt], list[dict[str, Any]]]:
    with stage.display.phase("GRPO", stage.steps) as bar:
        follower = FollowerProcess(
            stage.url,
            stage.root / "base",
            stage.root / "follower",
            stage.watched,
            lambda event: _show(bar, stage.steps, event),
        )
        try:
            follower.wait_until_ready()
            callback = DeltaChainCallback(stage.url, when_busy="wait")
            dumps = DumpCallback(stage.root / "trainer", steps=stage.watched)

            run_grpo(
                stage.root / "base",
                callbacks=[callback, dumps],
                steps=stage.steps,
                progress=lambda at, got: bar.at(at, f"trainer: step {at}, reward {got:.2f}"),
            )
            versions = {receipt.step: receipt.version for receipt in callback.receipts}
            follower.finish(last=versions[stage.steps], back_to=versions[stage.watched[-2]])
        finally:
            follower.kill()
    return callback.receipts, follower.lines


def _show(bar: Bar, steps: int, event: dict[str, Any]) -> None:
    step = event.get("step")
    if event["event"] == "ready":
        bar.say("  [cyan]follower[/] is up, and waits for the chain")
    elif event["event"] != "applied" or step is None or step % max(1, steps // 4) == 0:
        at = f"[cyan]follower[/] {event['event']:<11} version {event['version']:>2}"
        bar.say(f"  {at}: [dim]{event['text']}[/]")


def _join_late(stage: Stage) -> ApplyReceipt:
    with Subscriber(stage.url, stage.root / "latecomer") as subscriber:
        receipt = subscriber.update()
    if receipt is None:
        raise DemoError("the late joiner found no version")
    stage.display.say(
        f"  [cyan]latecomer[/] from nothing to version {receipt.version}: {receipt.nbytes:,} B"
    )
    return receipt


def _evaluate(stage: Stage) -> tuple[BitCheck, ...]:
    last, middle = stage.watched[-1], stage.watched[-2]
    follower = stage.root / "follower"
    cases = [
        (step, f"follower at step {step}", follower / f"step-{step}") for step in stage.watched
    ]
    cases += [
        (middle, f"follower rolled back to step {middle}", follower / "rollback"),
        (last, f"follower released, at step {last}", follower / "released"),
        (last, f"latecomer at step {last}", stage.root / "latecomer"),
    ]
    dumps = DumpCallback(stage.root / "trainer", steps=())
    return tuple(compare(what, dumps.path(step), held) for step, what, held in cases)


def _row(receipt: PublishReceipt, applied: dict[str, Any], dense: int) -> VersionRow:
    return VersionRow(
        version=receipt.version,
        step=receipt.step,
        density=receipt.density,
        nbytes=receipt.nbytes,
        requests=receipt.requests,
        ratio=dense / max(1, receipt.nbytes),
        stage_ms=applied["stage_ms"],
        swap_ms=applied["swap_ms"],
        lag_versions=applied["lag_versions"],
        staleness_s=applied["staleness_s"],
    )
