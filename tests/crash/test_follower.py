"""A follower that is killed inside a swap, and what its successor finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltachain.checkpoint import Checkpoint
from deltachain.publish import PublishConfig, Publisher
from deltachain.subscribe import FolderTarget, Subscriber
from deltachain.subscribe.targets.folder import LOCK_FILE
from tests.support.models import State, TinyModel, bits_of, replica_of, same, train_

FOLDER = "deltachain.subscribe.targets.folder"
JOURNAL = "deltachain.subscribe.targets.folder"
TARGET = "deltachain.subscribe.targets.base"


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[State]]:
    url = str(tmp_path_factory.mktemp("store") / "chain")
    model = TinyModel()
    truth: list[State] = [bits_of(model)]
    with Publisher(PublishConfig(url=url)).attach(model) as publisher:
        for step in (1, 2, 3):
            train_(model, step, share=0.05)
            publisher.publish(step=step)
            publisher.flush()
            truth.append(bits_of(model))
    return url, truth


def prove(url: str, kind: str, folder: Path, *, holds: int | None, truth: list[State]) -> None:
    replica = replica_of(TinyModel(), kind, folder)
    subscriber = Subscriber(url, replica.target)
    assert subscriber.status().version == holds
    assert subscriber.scrub() == (holds is not None)
    if holds is not None:
        assert same(replica.bits(), truth[holds])
    subscriber.update()
    assert subscriber.version == 3
    assert same(replica.bits(), truth[3])
    assert subscriber.scrub()


@pytest.mark.parametrize(
    ("kill", "holds"),
    [
        ([JOURNAL, "write_atomic", 1, "before"], 1),
        ([JOURNAL, "write_atomic", 1, "after"], 1),
        ([JOURNAL, "write_atomic", 2, "before"], 1),
        ([JOURNAL, "write_atomic", 2, "after"], 2),
        ([FOLDER, "write", 3, "before"], 2),
        ([FOLDER, "write_atomic", 1, "before"], 2),
        ([FOLDER, "write_atomic", 1, "after"], 2),
    ],
    ids=[
        "before-the-journal",
        "before-the-seal",
        "while-sealing",
        "after-the-seal",
        "while-writing",
        "before-it-is-remembered",
        "before-the-journal-is-cleared",
    ],
)
def test_a_folder_holds_the_version_before_or_the_one_after(
    killed: Callable[..., None],
    chain: tuple[str, list[State]],
    tmp_path: Path,
    kill: list[Any],
    holds: int,
) -> None:
    url, truth = chain
    mirror = tmp_path / "mirror"
    killed(role="follow", url=url, kind="folder", folder=str(mirror), versions=[1, 2], kill=kill)
    prove(url, "folder", mirror, holds=holds, truth=truth)


@pytest.mark.parametrize(
    ("kill", "holds"),
    [
        ([FOLDER, "write", 3, "before"], None),
        ([FOLDER, "write_atomic", 1, "after"], None),
        (["deltachain.checkpoint", "sync_folder", 2, "before"], 2),
    ],
    ids=["while-writing", "before-the-weights-appear", "after-the-weights-appeared"],
)
def test_a_folder_that_was_being_filled_holds_nothing_or_everything(
    killed: Callable[..., None],
    chain: tuple[str, list[State]],
    tmp_path: Path,
    kill: list[Any],
    holds: int | None,
) -> None:
    url, truth = chain
    mirror = tmp_path / "mirror"
    killed(role="follow", url=url, kind="folder", folder=str(mirror), versions=[2], kill=kill)
    prove(url, "folder", mirror, holds=holds, truth=truth)
    left = {path.name for path in mirror.iterdir()}
    assert left == {"model.safetensors", "deltachain.json", LOCK_FILE}


@pytest.mark.parametrize("kind", ["dict", "module"])
def test_memory_is_lost_and_its_successor_joins_again(
    killed: Callable[..., None], chain: tuple[str, list[State]], tmp_path: Path, kind: str
) -> None:
    url, truth = chain
    kill = [TARGET, "write_patch", 3, "before"]
    nowhere = tmp_path / "unused"
    killed(role="follow", url=url, kind=kind, folder=str(nowhere), versions=[1, 2], kill=kill)
    assert not nowhere.exists()
    prove(url, kind, nowhere, holds=None, truth=truth)


def test_a_folder_has_one_follower_at_a_time(tmp_path: Path) -> None:
    code = (
        "import sys; from deltachain.subscribe import FolderTarget; from pathlib import Path\n"
        "FolderTarget(Path(sys.argv[1])).bind({}, {})"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    target = FolderTarget(tmp_path)
    target.bind({}, {})
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode != 0
    assert "another process writes to" in second.stderr
    target.close()
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize("command", [["pull"], ["follow", "--once"]], ids=" ".join)
def test_the_command_line_goes_on_where_it_was_killed(
    chain: tuple[str, list[State]], tmp_path: Path, command: list[str]
) -> None:
    url, truth = chain
    mirror = tmp_path / "mirror"
    run = "from deltachain.cli import main; main()"
    first = [sys.executable, "-c", run, "pull", url, "--version", "1", "--out", str(mirror)]
    subprocess.run(first, check=True, capture_output=True)
    kill = (
        "import os, signal, itertools; from deltachain.subscribe.targets import folder\n"
        "write, calls = folder.write, itertools.count()\n"
        "def dying(*args):\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if next(calls) == 1 else write(*args)\n"
        "folder.write = dying\n"
    )
    words = [command[0], url, *command[1:], "--out", str(mirror)]
    killed = subprocess.run([sys.executable, "-c", kill + run, *words], check=False)
    assert killed.returncode == -9
    again = subprocess.run([sys.executable, "-c", run, *words], check=False, capture_output=True)
    assert again.returncode == 0, again.stderr
    held = Checkpoint(mirror)
    names = held.specs.keys() & truth[3].keys()  # tied weights are there once
    assert names
    assert same({n: held.bits(n) for n in names}, {n: truth[3][n] for n in names})
