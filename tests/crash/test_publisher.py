"""A publisher that is killed, at every point that matters, and what a restart makes of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from deltachain.chain import Chain
from deltachain.errors import ObjectNotFoundError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import FileStore
from deltachain.subscribe import Subscriber
from deltachain.testing.models import (
    State,
    TinyModel,
    bits_of,
    recompute,
    same,
    tensors_of,
    train_,
)

DELTA = f"deltas/{2:020d}-"
MANIFEST = f"manifests/{2:020d}"


def at_step(step: int) -> TinyModel:
    """The model as the trainer had it after a step."""
    model = TinyModel()
    for done in range(1, step + 1):
        train_(model, done)
    return model


def assert_truth(found: dict[int, State]) -> None:
    """What the killed process committed are the states that it had, one a version."""
    for version, state in found.items():
        assert same(state, bits_of(at_step(version))), f"version {version}"


def states(url: Path) -> dict[int, State]:
    return {v: r.state for v, r in recompute(FileStore(url)).items()}


def manifests(url: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (url / "manifests").glob("*")}


def restart(url: Path, model: TinyModel) -> None:
    """Continue from a state, and publish two more versions."""
    with Publisher(PublishConfig(url=str(url))).attach(model) as publisher:
        for step in (100, 101):
            train_(model, step)
            publisher.publish(step=step)
            publisher.flush()


def check_restart(url: Path, copy: Path, *, step: int) -> None:
    """Restart on a copy of the store, with a follower that was there before."""
    shutil.copytree(url, copy)
    before, model = manifests(copy), at_step(step)
    followed = tensors_of(model)
    subscriber = Subscriber(str(copy), followed)
    joined = subscriber.update() if before else None
    restart(copy, model)
    after = manifests(copy)
    assert {name: after[name] for name in before} == before
    found = states(copy)
    assert same(found[max(found)], bits_of(model))
    subscriber.update()
    assert same(bits_of(followed), bits_of(model))
    assert joined is None or subscriber.version != joined.version
    fresh = tensors_of(model)
    Subscriber(str(copy), fresh).update()
    assert same(bits_of(fresh), bits_of(model))


@pytest.mark.parametrize(
    ("do", "prefix", "nth", "committed"),
    [
        ("kill", DELTA, 1, 2),
        ("kill", DELTA, 2, 2),
        ("kill", MANIFEST, 1, 2),
        ("kill-after", MANIFEST, 1, 3),
        ("kill", f"anchors/{2:020d}-", 2, 3),
        ("kill-after", f"edges/{2:020d}/", 1, 3),
    ],
    ids=[
        "before-upload",
        "between-parts",
        "between-upload-and-manifest",
        "after-manifest",
        "between-parts-of-an-anchor",
        "after-the-record-of-an-anchor",
    ],
)
def test_a_killed_publisher_is_continued_without_a_fork(
    killed: Callable[..., None], tmp_path: Path, do: str, prefix: str, nth: int, committed: int
) -> None:
    url = tmp_path / "chain"
    killed(role="publish", url=str(url), do=do, prefix=prefix, nth=nth)
    found = states(url)
    assert len(found) == committed
    assert_truth(found)
    check_restart(url, tmp_path / "same", step=2)
    check_restart(url, tmp_path / "older", step=1)
    check_restart(url, tmp_path / "newer", step=3)


@pytest.mark.parametrize(
    ("do", "prefix"),
    [
        ("kill-after", "table.json"),
        ("kill-after", "chain.json"),
        ("kill", f"manifests/{0:020d}"),
    ],
    ids=["without-identity", "without-payload", "without-manifest"],
)
def test_a_publisher_that_was_killed_before_its_first_version_is_succeeded(
    killed: Callable[..., None], tmp_path: Path, do: str, prefix: str
) -> None:
    url = tmp_path / "chain"
    killed(role="publish", url=str(url), do=do, prefix=prefix, nth=1)
    assert manifests(url) == {}
    if prefix == "table.json":
        with pytest.raises(ObjectNotFoundError):
            Chain.open(FileStore(url))
        restart(url, model := at_step(0))
        found = states(url)
        assert same(found[max(found)], bits_of(model))
        return
    assert Chain.open(FileStore(url)).head() is None
    restart(url, model := at_step(0))
    found = states(url)
    assert list(found) == [0, 1, 2]
    assert same(found[2], bits_of(model))
