"""A publisher that is killed, at every point that matters, and what a restart makes of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

from deltachain.chain.chain import Chain
from deltachain.errors import ObjectNotFoundError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.subscribe import Subscriber
from tests.crash.child import STEPS
from tests.crash.places import Place, contents, copy_store
from tests.support.models import (
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
        ("kill", f"anchors/{1:020d}-", 2),
        ("kill", f"edges/{1:020d}/", 1),
        ("kill-after", f"edges/{1:020d}/", 1),
    ],
    ids=["between-parts", "before-the-record", "after-the-record"],
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
        ("kill-after", "table.json"),
        ("kill-after", "chain.json"),
        ("kill", f"manifests/{0:020d}"),
    ],
    ids=["without-identity", "without-payload", "without-manifest"],
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
        restart(url, model := at_step(0))
        found = states(url)
        assert same(found[max(found)], bits_of(model))
        return
    assert Chain.open(open_store(url)).head() is None
    restart(url, model := at_step(0))
    found = states(url)
    assert list(found) == [0, 1, 2]
    assert same(found[2], bits_of(model))
