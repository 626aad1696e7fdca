"""A publisher that is killed, at every point that matters, and what a restart makes of it."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from deltachain.chain.chain import Chain
from deltachain.checkpoint import Checkpoint
from deltachain.errors import ObjectNotFoundError
from deltachain.format.documents import EdgeRecord, Manifest, unseal
from deltachain.format.keys import MIRROR_KEY, PUBLISHER_KEY
from deltachain.mirror import Mirror
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.subscribe import FolderTarget, Subscriber
from deltachain.subscribe.targets.folder import LOCK_FILE
from tests.crash.child import STEPS, Place, contents, copy_store
from tests.support.models import (
    State,
    TinyModel,
    bits_of,
    recompute,
    replica_of,
    same,
    tensors_of,
    train_,
)

pytestmark = pytest.mark.full

FILEBITS = "deltachain.file_access"
CHECKPOINT = "deltachain.checkpoint"
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
    subscriber.open()
    assert subscriber.status().version == holds
    assert subscriber.scrub() == (holds is not None)
    if holds is not None:
        assert same(replica.bits(), truth[holds])
    subscriber.update()
    assert subscriber.version == 3
    assert same(replica.bits(), truth[3])
    assert subscriber.scrub()


def folder_kill(point: str, nth: int, when: str, holds: int | None, name: str, first: int) -> Any:
    module = FILEBITS if point == "FileBits.put" else CHECKPOINT
    return pytest.param([*range(first, 3)], [module, point, nth, when], holds, id=name)


@pytest.mark.parametrize(
    ("versions", "kill", "holds"),
    [
        folder_kill("write_atomic", 1, "before", 1, "before-the-journal", 1),
        folder_kill("write_atomic", 1, "after", 1, "before-the-seal", 1),
        folder_kill("write_atomic", 2, "before", 1, "while-sealing", 1),
        folder_kill("write_atomic", 2, "after", 2, "after-the-seal", 1),
        folder_kill("FileBits.put", 3, "before", 2, "while-writing", 1),
        folder_kill("write_atomic", 3, "before", 2, "before-it-is-remembered", 1),
        folder_kill("write_atomic", 3, "after", 2, "before-the-journal-is-cleared", 1),
        folder_kill("FileBits.put", 3, "before", None, "while-filling", 2),
        folder_kill("write_atomic", 1, "after", None, "before-the-weights-appear", 2),
        folder_kill("sync_folder", 2, "before", 2, "after-the-weights-appeared", 2),
    ],
)
def test_a_folder_holds_the_version_before_or_the_one_after(
    killed: Callable[..., None],
    chain: tuple[str, list[State]],
    tmp_path: Path,
    versions: list[int],
    kill: list[Any],
    holds: int | None,
) -> None:
    """The one before may be none: the folder was being filled."""
    url, truth = chain
    mirror = tmp_path / "mirror"
    killed(role="follow", url=url, kind="folder", folder=str(mirror), versions=versions, kill=kill)
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
        "import os, signal, itertools; from deltachain.file_access import FileBits\n"
        "put, calls = FileBits.put, itertools.count()\n"
        "def dying(*args):\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if next(calls) == 1 else put(*args)\n"
        "FileBits.put = dying\n"
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


KILLS = 10


def publish(url: str) -> TinyModel:
    model = TinyModel()
    config = PublishConfig(url=url, part_nbytes=64, anchor_every=2)
    with Publisher(config).attach(model, assets={"config.json": b"{}"}) as publisher:
        for step in range(1, 13):
            train_(model, step)
            publisher.publish(step=step)
            publisher.flush()
    return model


def arrived(place: Place, url: str) -> dict[str, bytes]:
    """Every object of a mirror whose writers were killed."""
    return {key: data for key, data in contents(url).items() if data or place.kind != "s3"}


def check_whole(found: dict[str, bytes]) -> None:
    for key, data in found.items():
        if key.startswith("manifests/"):
            parts = unseal(data, Manifest, key=key).edge.parts
        elif key.startswith("edges/"):
            parts = unseal(data, EdgeRecord, key=key).edge.parts
        else:
            continue
        for part in parts:
            assert len(found[part.key]) == part.nbytes, f"{key} names {part.key}"


@pytest.mark.parametrize(
    "kind", ["s3", *(pytest.param(k, marks=pytest.mark.slow) for k in ("file", "hf"))]
)
def test_a_mirror_that_is_killed_ten_times_is_byte_identical(
    kind: str, place_of: Callable[[str], Place], killed: Callable[..., None], tmp_path: Path
) -> None:
    place = place_of(kind)
    url, there = str(tmp_path / "source"), place.url("mirror")
    model, source = publish(url), contents(url)
    del source[PUBLISHER_KEY]  # where a publisher is at work, not what it published
    for count in range(KILLS):
        do = "kill-after" if count % 2 else "kill"
        killed(role="mirror", url=url, destination=there, do=do, nth=3 + count % 4 * 3)
        found = arrived(place, there)
        assert found.keys() - source.keys() <= {MIRROR_KEY}
        copied = {key: data for key, data in found.items() if key != MIRROR_KEY}
        assert copied == {key: source[key] for key in copied}
        check_whole(found)
    with closing(open_store(url)) as one, closing(open_store(there, writer=True)) as two:
        before = arrived(place, there)
        new = sum(receipt.objects for receipt in Mirror(one, two).catch_up())
        found = contents(there)
        assert new <= len(found) - len(before)
        assert list(Mirror(one, two).catch_up()) == []
        recompute(two)
    found.pop(MIRROR_KEY)
    assert found == source
    tensors = tensors_of(model)
    with Subscriber(there, tensors) as subscriber:
        subscriber.update()
    assert same(bits_of(tensors), bits_of(model))


DELTA = f"deltas/{2:020d}-"
MANIFEST = f"manifests/{2:020d}"


def at_step(step: int) -> TinyModel:
    model = TinyModel()
    for done in range(1, step + 1):
        train_(model, done)
    return model


def assert_truth(found: dict[int, State]) -> None:
    for version, state in found.items():
        assert same(state, bits_of(at_step(version))), f"version {version}"


def states(url: str) -> dict[int, State]:
    with closing(open_store(url)) as store:
        return {v: r.state for v, r in recompute(store).items()}


def restart(url: str, model: TinyModel) -> None:
    with Publisher(PublishConfig(url=url)).attach(model) as publisher:
        for step in (100, 101):
            train_(model, step)
            publisher.publish(step=step)
            publisher.flush()


def check_restart(url: str, copy: str, *, step: int) -> None:
    copy_store(url, copy)
    before, model = contents(copy, "manifests/"), at_step(step)
    followed = tensors_of(model)
    with Subscriber(copy, followed) as subscriber:
        joined = subscriber.update() if before else None
        restart(copy, model)
        after = contents(copy, "manifests/")
        assert {name: after[name] for name in before} == before
        found = states(copy)
        assert same(found[max(found)], bits_of(model))
        subscriber.update()
        assert same(bits_of(followed), bits_of(model))
        assert joined is None or subscriber.version != joined.version
    fresh = tensors_of(model)
    with Subscriber(copy, fresh) as subscriber:
        subscriber.update()
    assert same(bits_of(fresh), bits_of(model))


@pytest.mark.parametrize(
    ("do", "prefix", "nth", "committed"),
    [
        pytest.param("kill", DELTA, 1, 2, id="before-upload"),
        pytest.param("kill", DELTA, 2, 2, id="between-parts"),
        pytest.param("kill", MANIFEST, 1, 2, id="between-upload-and-manifest"),
        pytest.param("kill-after", MANIFEST, 1, 3, id="after-manifest"),
        pytest.param("kill", f"anchors/{2:020d}-", 2, 3, id="between-parts-of-an-anchor"),
        pytest.param("kill-after", f"edges/{2:020d}/", 1, 3, id="after-the-record-of-an-anchor"),
    ],
)
def test_a_killed_publisher_is_continued_without_a_fork(
    killed: Callable[..., None], place: Place, do: str, prefix: str, nth: int, committed: int
) -> None:
    url = place.url()
    killed(role="publish", url=url, do=do, prefix=prefix, nth=nth)
    found = states(url)
    assert len(found) == committed
    assert_truth(found)
    check_restart(url, place.url("older"), step=1)
    if place.kind == "file":  # what differs between stores was seen by now
        check_restart(url, place.url("same"), step=2)
        check_restart(url, place.url("newer"), step=3)


@pytest.mark.parametrize(
    ("do", "prefix", "nth"),
    [
        pytest.param("kill", f"anchors/{1:020d}-", 2, id="between-parts"),
        pytest.param("kill", f"edges/{1:020d}/", 1, id="before-the-record"),
        pytest.param("kill-after", f"edges/{1:020d}/", 1, id="after-the-record"),
    ],
)
def test_a_publisher_killed_while_it_adds_a_late_anchor_loses_no_version(
    killed: Callable[..., None], place: Place, do: str, prefix: str, nth: int
) -> None:
    url = place.url()
    killed(role="publish", url=url, do=do, prefix=prefix, nth=nth, late=True)
    found = states(url)
    assert sorted(found) == list(range(STEPS + 1))
    assert_truth(found)
    check_restart(url, place.url("same"), step=STEPS)


@pytest.mark.parametrize(
    ("do", "prefix"),
    [
        pytest.param("kill-after", "table.json", id="without-identity"),
        pytest.param("kill-after", "chain.json", id="without-payload"),
        pytest.param("kill", f"manifests/{0:020d}", id="without-manifest"),
    ],
)
def test_a_publisher_that_was_killed_before_its_first_version_is_succeeded(
    killed: Callable[..., None], place: Place, do: str, prefix: str
) -> None:
    url = place.url()
    killed(role="publish", url=url, do=do, prefix=prefix, nth=1)
    assert contents(url, "manifests/") == {}
    if prefix == "table.json":
        with pytest.raises(ObjectNotFoundError):
            Chain.open(open_store(url))
    else:
        assert Chain.open(open_store(url)).head() is None
    restart(url, model := at_step(0))
    found = states(url)
    assert list(found) == [0, 1, 2]
    assert same(found[2], bits_of(model))
