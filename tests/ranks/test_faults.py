import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import deltachain
from deltachain.chain.chain import Chain
from deltachain.cli.pull import pull
from deltachain.errors import RankError, StoreUnavailableError, StoreWentBackError
from deltachain.format.keys import manifest_key
from deltachain.publish import Publisher
from deltachain.publish.model.layout import local_of
from deltachain.publish.snapshot import Snapshot
from deltachain.store import open_store
from deltachain.verify import verify
from tests.ranks.models import Training, compare, faulty, whole
from tests.ranks.spawn import on_ranks, run
from tests.ranks.test_layouts import steps_of
from tests.support.faults import Fault

pytestmark = pytest.mark.dist

DEADLINE_S = 4.0

STRIKES = [
    (0, "absent", "", 2, 1),
    (1, "absent", "", 2, 1),
    (0, "in-diff", "", 2, 1),
    (1, "in-diff", "", 2, 1),
    (1, "kill", "deltas/", 2, 1),
    (1, "kill-after", "deltas/", 2, 1),
    (0, "kill", "deltas/", 2, 1),
    (0, "kill-after", "deltas/", 2, 1),
    (0, "kill", "manifests/", 1, 1),
    (0, "kill-after", "manifests/", 2, 1),
    (1, "kill", "anchors/", 2, 1),
    (0, "kill", "edges/", 3, 0),
]
"""Who dies, how, at the second write of what if any; how many versions are committed by then, and
whether training, which goes on after its second step, then differs from the newest."""


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "do", "prefix", "committed", "differs"), STRIKES)
def test_a_rank_that_is_killed_commits_nothing_and_the_next_publish_covers_it(
    tmp_path: Path, victim: int, do: str, prefix: str, committed: int, differs: int
) -> None:
    url = (tmp_path / "chain").as_uri()
    run(dies, 2, url, victim, do, prefix, deaths=1)
    before = [proof.version for proof in verify(Chain.open(open_store(url)))]
    assert before == list(range(committed))
    run(steps_of, 2, "stages", url, str(tmp_path), 2, 2)
    after = [proof.version for proof in verify(Chain.open(open_store(url)))]
    # The one that takes over, the difference if there is one, and two steps.
    assert after == list(range(committed + 1 + differs + 2))


def dies(rank: int, url: str, victim: int, do: str, prefix: str) -> None:
    at_store = rank == victim and bool(prefix)
    fault = [Fault(do, prefix, nth=2)] if at_store else []  # type: ignore[arg-type]
    settings = {"when_busy": "wait", "deadline_s": DEADLINE_S, "anchor_factor": 0.01}
    training = Training(url, "stages", store=faulty(url, *fault), **settings).__enter__()
    futures, noticed = [], []
    start = time.monotonic()
    try:
        for number in range(4):
            training.train(number)
            if rank == victim and number == 1 and do == "absent":
                _end()
            if rank == victim and number == 1 and do == "in-diff":
                Snapshot.diff_ = _end  # type: ignore[method-assign,assignment]
            futures.append(training.publisher.publish(step=number))
            if futures[-1].exception(60) is None:
                training.publisher.flush()  # an anchor that follows a version is added meanwhile
    except RankError as exc:
        noticed.append(exc)
    assert time.monotonic() - start < 10 * DEADLINE_S
    errors = [error for future in futures if (error := future.exception(60)) is not None]
    assert errors or noticed, "somebody died, and nobody noticed"
    assert all(isinstance(error, RankError) for error in errors), errors
    os._exit(0)  # the process group cannot be left in order


def _end(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@on_ranks(2)
def test_a_rank_that_stalls_is_named_and_the_next_version_covers_it(
    rank: int, url: str, folder: str
) -> None:
    slow = [Fault("slow", "deltas/", nth=2, seconds=3 * DEADLINE_S)] if rank == 1 else []
    settings: dict[str, Any] = {
        "when_busy": "wait",
        "on_error": "warn",
        "deadline_s": DEADLINE_S,
    }
    with Training(url, store=faulty(url, *slow), **settings) as training:
        errors = [training.publish(number).exception(60) for number in range(4)]
        names = [type(error).__name__ for error in errors]
        assert names == ["NoneType", "RankError", "NoneType", "NoneType"]
        assert training.publisher.version == 3
        training.check(3, folder)


@on_ranks(2)
def test_a_rank_whose_training_fails_ends_at_once(rank: int, url: str, folder: str) -> None:
    del folder
    slow = Fault("slow", "deltas/", seconds=1.0, times=None)
    training = Training(url, "stages", store=faulty(url, slow), deadline_s=DEADLINE_S).__enter__()
    for number in range(2):
        waiting = training.publish(number)
    start = time.monotonic()
    if rank == 1:
        training.__exit__(ValueError, ValueError("a batch that cannot be read"), None)
        assert time.monotonic() - start < DEADLINE_S
    else:
        with pytest.raises(RankError, match="rank 1 did not answer"):
            training.__exit__(None, None, None)
    assert isinstance(waiting.exception(60), RankError)


@on_ranks(2)
def test_ranks_that_publish_without_a_pause_commit_every_version(
    rank: int, url: str, folder: str
) -> None:
    with Training(url, when_busy="wait", deadline_s=30) as training:
        futures = []
        for number in range(6):
            training.train(number)
            futures += [training.publisher.publish(step=number) for _ in range(4)]
        assert [future.result(60).version for future in futures] == list(range(1, 25))
    training.check(24, folder)
    if rank == 0:
        proofs = list(verify(Chain.open(open_store(url))))
        assert [proof.version for proof in proofs] == list(range(25))


@on_ranks(3)
def test_ranks_that_could_not_attach_meet_at_the_next_attempt(
    rank: int, url: str, folder: str
) -> None:
    first = Training(url, deadline_s=1.0)
    if rank != 1:
        with pytest.raises(RankError, match="rank 1 did not answer") as caught:
            Publisher(first.config).attach(first.model)
        assert "every rank" in caught.value.hint
    distributed.barrier()
    with Training(url) as training:
        assert training.publisher.version == 0
        training.check(0, folder)


@on_ranks(2)
def test_a_rank_that_flushes_alone_is_in_step_again_later(rank: int, url: str, folder: str) -> None:
    slow = faulty(url, Fault("slow", "deltas/", seconds=4.0, times=1))
    with Training(url, "stages", store=slow, on_error="warn", deadline_s=4.0) as training:
        for number in range(4):
            future = training.publish(number)
            if (rank, number) == (1, 1):
                assert not future.done()
                training.publisher.flush()  # longer than rank 0 has patience for
            distributed.barrier()
        assert training.publisher.flush() is not None
        assert future.result(60).step == number
        training.check(training.publisher.version, folder)


@on_ranks(2)
def test_a_rank_that_can_not_read_the_store_tells_the_others(
    rank: int, url: str, folder: str
) -> None:
    del folder
    fault = [Fault("fail-read", "chain.json", times=None)] if rank == 1 else []
    start = time.monotonic()
    with pytest.raises((RankError, StoreUnavailableError), match=r"rank 1: |unavailable") as caught:
        Training(url, store=faulty(url, *fault)).__enter__()
    assert isinstance(caught.value, RankError) == (rank != 1)
    assert time.monotonic() - start < 30


@on_ranks(2)
def test_steps_after_the_last_version_are_published_at_the_end(
    rank: int, url: str, folder: str
) -> None:
    training = Training(url)
    model, optimizer = training.model, training.optimizer
    settings: dict[str, Any] = {"url": url, "dtype": "BF16", "deadline_s": 60}
    attachment = deltachain.attach(model, optimizer, every_steps=2, **settings)
    for number in range(3):
        training.train(number)
    attachment.detach()
    assert attachment.publisher.version == 2
    training.check(2, folder)
    for changes in (True, False):
        attachment = deltachain.attach(model, optimizer, **settings)
        version = attachment.publisher.version
        if changes and rank == 1:
            with torch.no_grad():
                local_of(optimizer.param_groups[0]["params"][0]).mul_(2.0)
        attachment.detach()
        assert attachment.publisher.version - version == changes
        training.check(attachment.publisher.version, folder)
        distributed.barrier()


@on_ranks(2)
def test_a_rank_that_misses_a_publish_is_in_step_at_the_next(
    rank: int, url: str, folder: str
) -> None:
    with Training(url, when_busy="wait", on_error="warn", deadline_s=4.0) as training:
        for number in range(4):
            if (rank, number) == (1, 1):
                training.train(number)
            else:
                future = training.publish(number)
                assert number == 1 or future.result(60).step == number
            distributed.barrier()
        training.check(training.publisher.version, folder)
    assert training.publisher.version == 3


@on_ranks(2)
def test_versions_that_cover_several_steps_are_of_one_step_on_all_ranks(
    rank: int, url: str, folder: str
) -> None:
    slow = Fault("slow", "deltas/", seconds=0.2, times=None)
    dice, steps = random.Random(rank), {}
    with Training(url, store=faulty(url, slow)) as training:
        for number in range(24):
            training.train(number)
            steps[number] = whole(training.model)
            time.sleep(dice.random() * 0.1)
            training.publisher.publish(step=number)
        training.publisher.flush()
    if rank:
        return
    chain = Chain.open(open_store(url))
    published = [one.manifest for one in chain.history(1, training.publisher.version)]
    assert 3 < len(published) < 24
    for manifest in published:
        assert manifest.step is not None
        pull(url, out=Path(folder) / str(manifest.version), version=manifest.version)
        compare(Path(folder) / str(manifest.version), steps[manifest.step])


@on_ranks(2)
def test_a_store_that_went_back_stops_all_ranks_until_it_is_as_it_was(
    rank: int, url: str, folder: str
) -> None:
    store = open_store(url)
    newest = [manifest_key(version) for version in (2, 3, 4)]
    with Training(url, when_busy="wait") as training:
        for number in range(4):
            assert training.publish(number).result(60).version == number + 1
        lost = {key: store.get(key) for key in newest}
        distributed.barrier()
        if rank == 0:
            for key in newest:
                store.delete(key)
        distributed.barrier()
        there = [info.key for info in store.list("manifests/")]
        error = training.publish(4).exception(60)
        assert isinstance(error, StoreWentBackError), error
        assert "restart this publisher" in error.hint
        with pytest.raises(StoreWentBackError):
            training.publisher.flush()
        distributed.barrier()
        assert [info.key for info in store.list("manifests/")] == there
        distributed.barrier()
        if rank == 0:
            for key, data in lost.items():
                store.put(key, data)
        distributed.barrier()
        assert training.publish(5).result(60).version == 5
        training.check(5, folder)
