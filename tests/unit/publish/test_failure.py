import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from deltachain import errors
from deltachain.chain.upload import (
    PARTS_ON_THE_WAY,
    SMALL_PART_NBYTES,
    UPLOADS,
    EdgeKeys,
    EdgeUpload,
    anchor_part_nbytes,
)
from deltachain.codec import Part
from deltachain.format.documents import Edge
from deltachain.format.keys import HEAD_KEY, manifest_key
from deltachain.kernels import host
from deltachain.publish.ranks.collectives import Collective
from deltachain.publish.session import Conclusion
from deltachain.publish.wire_form import dense_change
from deltachain.store import MemoryStore, open_store
from deltachain.threads import Pool
from deltachain.types import Bits, Buffer, TensorSpec
from tests.crash.child import open_place
from tests.support.faults import Action, Fault
from tests.support.models import TinyModel, bits_of, plain_model, recompute, same, train_
from tests.support.values import present
from tests.unit.publish.chains import Begin, NewThreads, assert_head_is, head_of

SCRIPT = """
import os
import torch
import deltachain
from tests.support.models import plain_model, train_

model = plain_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
{made}
for step in range(1, 5):
    train_(model, step)
    {publish}
{end}
"""
BY_HAND = (
    "publisher = deltachain.Publisher({url!r}).attach(model)",
    "publisher.publish(step=step)",
)
BY_STEPS = (
    "for p in model.parameters(): p.grad = torch.zeros_like(p)\n"
    "deltachain.attach(model, optimizer, url={url!r})",
    "optimizer.step()",
)
EVERY_THREE = (BY_STEPS[0].replace("url=", "every_steps=3, url="), BY_STEPS[1])


def run(url: str, way: tuple[str, str], end: str) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(made=way[0].format(url=url), publish=way[1], end=end)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "end", "code"),
    [
        (BY_HAND, "", 0),
        (BY_STEPS, "raise SystemExit(3)", 3),
        (BY_HAND, "1 / 0", 1),
        (EVERY_THREE, "", 0),
        (EVERY_THREE, "1 / 0", 1),
    ],
)
def test_the_last_step_is_committed_as_the_process_ends(
    tmp_path: Path, way: tuple[str, str], end: str, code: int
) -> None:
    """Steps after the last version are not, if an error ends it."""
    done = run(str(tmp_path), way, end)
    assert done.returncode == code, done.stderr
    assert "Exception ignored" not in done.stderr
    last = 3 if way is EVERY_THREE and end == "1 / 0" else 4
    model = plain_model()
    for step in range(1, last + 1):
        train_(model, step)
    store = open_store(tmp_path)
    assert head_of(store).manifest.step == last
    assert same(recompute(store)[head_of(store).version].state, bits_of(model))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["s3", "hf"])
def test_the_last_version_is_committed_over_a_network(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of clients have ended by then, and no other may be started."""
    place = open_place(kind, tmp_path, request.getfixturevalue, monkeypatch.setenv)
    done = run(place.url(), BY_STEPS, "")
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    found = recompute(open_store(place.url()))
    assert found[max(found)].committed.manifest.step == 4, done.stderr


@pytest.mark.full
def test_a_forked_process_commits_nothing(tmp_path: Path) -> None:
    done = run(
        str(tmp_path),
        BY_HAND,
        "publisher.flush()\nif os.fork() == 0: publisher.publish()\nos.wait()",
    )
    assert done.returncode == 0, done.stderr
    assert "of which this one is a fork" in done.stderr
    assert "closing the publisher" not in done.stderr


@pytest.mark.full
def test_what_fails_at_the_end_is_told(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    end = f"publisher.flush()\nimport shutil; shutil.rmtree({folder!r})\npublisher.publish(step=9)"
    done = run(folder, BY_HAND, end)
    assert done.returncode == 0, done.stderr
    assert f"closing the publisher at {Path(folder).as_uri()} as Python ended" in done.stderr
    assert "hint" in done.stderr


def test_the_rest_is_a_version_only_if_something_changed(begin: Begin) -> None:
    one = begin()
    one.publisher.publish_rest(step=0)
    assert one.publisher.version == 0
    train_(one.model, 1)
    one.publisher.publish_rest(step=1)
    one.publisher.flush()
    assert (one.publisher.version, present(one.publisher.last).step) == (1, 1)
    one.publisher.publish_rest(step=1)
    one.publisher.close()
    one.assert_head_is(1)


KEYS = EdgeKeys(kind="anchor", version=0, epoch=0, commit_id="0" * 32)
NUMEL = 300_000


class WatchedStore(MemoryStore):
    """Counts puts at a time; calls back before each."""

    def __init__(self, before: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self._before, self._counting = before, threading.Lock()
        self.now = self.most = 0

    @override
    def put(self, key: str, data: Buffer) -> str:
        with self._counting:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            self._before(key)
            return super().put(key, data)
        finally:
            with self._counting:
                self.now -= 1


def tensors(count: int) -> list[tuple[TensorSpec, Bits]]:
    rng = np.random.default_rng(0)
    return [
        (TensorSpec(f"w{n:02}", "BF16", (NUMEL,)), rng.integers(0, 1 << 16, NUMEL, np.uint16))
        for n in range(count)
    ]


def upload(store: MemoryStore, count: int, after: Callable[[int], object] = lambda _: None) -> Edge:
    """Upload an anchor of that many tensors, a part of two each; calls back after each tensor."""
    with EdgeUpload(store, KEYS, raw=False, part_nbytes=4 * NUMEL) as uploading:
        for number, (spec, bits) in enumerate(tensors(count)):
            uploading.add(dense_change(spec, bits))
            after(number)
        return uploading.finish()


def test_parts_are_in_the_order_of_their_tensors_whatever_arrives_first() -> None:
    late = threading.Event()

    def before(key: str) -> None:
        if key.endswith("00000.safetensors"):
            assert late.wait(60)
        elif key.endswith("00003.safetensors"):
            late.set()

    store = WatchedStore(before)
    edge = upload(store, 9)
    assert [ref.key[-17:-12] for ref in edge.parts] == [f"{n:05}" for n in range(5)]
    assert edge.encodings == ("dense",)
    found: dict[str, Bits] = {}
    for ref in edge.parts:
        part = Part.from_bytes(bytes(store.get(ref.key)))
        found |= {name: part.read(name).values for name in part.rows}
    made = tensors(9)
    assert list(found) == [spec.name for spec, _ in made]
    for spec, bits in made:
        np.testing.assert_array_equal(found[spec.name], bits)


@pytest.mark.full
def test_memory_is_bounded_while_the_store_stands_still() -> None:
    go, added = threading.Event(), list[int]()

    def wait(_: str) -> None:
        assert go.wait(60)

    store = WatchedStore(wait)
    thread = threading.Thread(target=upload, args=(store, 20, added.append))
    thread.start()
    thread.join(2.0)
    assert thread.is_alive()
    assert len(added) <= 2 * (PARTS_ON_THE_WAY + 1)
    go.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(added) == 20
    assert store.most == UPLOADS


@pytest.mark.parametrize("number", [0, 2, 4])
def test_the_first_failure_is_raised_and_later_parts_are_not_put(number: int) -> None:
    def before(key: str) -> None:
        if key.endswith(f"{number:05}.safetensors"):
            raise errors.StoreUnavailableError("the store is down")

    store = WatchedStore(before)
    with pytest.raises(errors.StoreUnavailableError, match="down"):
        upload(store, 40)
    assert len(list(store.list("anchors/"))) <= number + PARTS_ON_THE_WAY
    assert store.now == 0


def test_an_interrupted_caller_abandons_parts(new_threads: NewThreads) -> None:
    store = WatchedStore()

    def interrupt(number: int) -> None:
        if number == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload(store, 20, interrupt)
    assert len(list(store.list("anchors/"))) <= 5
    assert not new_threads("deltachain-upload")


def test_a_pool_ends_in_which_the_start_of_a_thread_was_interrupted(
    new_threads: NewThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, start = Pool(2, "deltachain-interrupted"), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        monkeypatch.undo()
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(int)
    assert pool.submit(int).result(60) == 0
    threading.Thread(target=pool.shutdown, daemon=True).start()
    for thread in new_threads("deltachain-interrupted"):
        thread.join(10)
        assert not thread.is_alive()


def test_parts_of_anchors_follow_the_size_of_the_model() -> None:
    assert anchor_part_nbytes(1 << 20, 512 << 20) == SMALL_PART_NBYTES
    assert anchor_part_nbytes(16 << 30, 512 << 20) == 512 << 20
    assert anchor_part_nbytes(4 << 30, 512 << 20) == 256 << 20
    assert anchor_part_nbytes(16 << 30, 1000) == 1000


FAILURES: list[tuple[Action, str]] = [
    ("fail", "deltas/"),
    ("lose-reply", "deltas/"),
    ("full", "deltas/"),
    ("refuse", "deltas/"),
    ("fail", "manifests/"),
    ("full", "manifests/"),
    ("refuse", "manifests/"),
]


# A publish that failed loses nothing


def test_publishing_goes_on_after_a_commit_whose_conclusion_was_lost(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has the version, and the ranks do not know: as if rank 0 lost its channel."""
    one = begin(on_error="warn")
    one.publish(1)
    broadcast, lost = Collective.broadcast, list[object]()

    def lose_one(collective: Collective, value: object, kind: type[object]) -> object:
        if kind is Conclusion and not lost:
            lost.append(value)
            raise errors.RankError("rank 0 is disconnected")
        return broadcast(collective, value, kind)

    monkeypatch.setattr(Collective, "broadcast", lose_one)
    with pytest.raises(errors.RankError, match="disconnected"):
        one.call(2).result()
    assert len(lost) == 1
    assert one.call(3).result().version == 3
    one.assert_head_is(3)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("failure", FAILURES)
def test_the_next_version_covers_those_that_failed(
    begin: Begin, failure: tuple[Action, str], on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = begin(TinyModel(), on_error=on_error)
    one.faulty.add(Fault(*failure, times=2))
    for step in (1, 2):
        error = one.call(step).exception(60)
        assert isinstance(error, errors.DeltaChainError)
        if on_error == "raise":
            with pytest.raises(errors.DeltaChainError) as raised:
                one.publisher.flush()
            assert raised.value is error
        else:
            one.publisher.flush()
        assert list(recompute(one.store)) == [0]
    if on_error == "warn":
        assert caplog.text.count("the next version makes up for it") == 2
    one.publish(3)
    one.assert_head_is(1)


@pytest.mark.parametrize("by", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("of", [(host, "diff_"), (Pool, "submit"), (Future, "exception")])
def test_what_an_interrupted_call_took_is_in_the_next_version(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, of: tuple[Any, str], by: type[BaseException]
) -> None:
    """Ctrl-C, or a handler of SIGALRM, in a comparison, a begin or a wait."""
    one, (owner, name) = begin(on_error="warn"), of
    if owner is Future:
        one.faulty.add(Fault("fail", "deltas/"))
    called = getattr(owner, name)
    with monkeypatch.context() as patched:

        def interrupted(*given: object) -> None:
            patched.undo()
            called(*given)
            raise by

        patched.setattr(owner, name, interrupted)
        with pytest.raises(by):
            one.publish(1)
    train_(one.model, 2)
    receipt = one.publisher.publish(step=2).result(60)
    one.assert_head_is(receipt.version)


@pytest.mark.parametrize("made_up_for", [False, True])
def test_a_close_says_that_the_last_version_is_missing_unless_it_was_made_up_for(
    begin: Begin, caplog: pytest.LogCaptureFixture, *, made_up_for: bool
) -> None:
    one = begin(on_error="warn")
    one.publish(1)
    one.faulty.add(Fault("full", "deltas/"))
    one.publish(2)
    assert max(recompute(one.store)) == 1
    if made_up_for:
        one.publish(3)
        one.assert_head_is(2)
    assert "closed at" not in caplog.text
    one.publisher.close()
    one.publisher.close()
    said = [text for text in caplog.messages if "closed at" in text]
    assert len(said) == (not made_up_for)
    for text in said:
        assert "closed at version 1; what was trained since may not be published" in text
        assert "the disk is full: free some space" in text


@pytest.mark.parametrize("when_busy", ["cover", "wait"])
def test_an_error_is_raised_once_by_the_next_call(begin: Begin, when_busy: str) -> None:
    one = begin(when_busy=when_busy)
    one.faulty.add(Fault("fail", "deltas/"))
    assert isinstance(one.call(1).exception(60), errors.StoreUnavailableError)
    with pytest.raises(errors.StoreUnavailableError):
        one.call(2)
    one.publish(3)
    one.assert_head_is(1)


# Outcomes that nobody knows


def test_a_lost_reply_of_our_own_commit_is_success(begin: Begin) -> None:
    one = begin()
    one.faulty.add(Fault("lose-reply", "manifests/"))
    one.publish(1)
    assert one.publisher.version == 1
    one.publish(2)
    one.assert_head_is(2)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_commit_that_turns_out_to_have_happened_is_not_repeated(
    begin: Begin, on_error: str
) -> None:
    one = begin(on_error=on_error)
    # The reply is lost, and the read-back says that there is nothing: a store that lags.
    one.faulty.add(Fault("lose-reply", "manifests/"), Fault("hide", manifest_key(1)))
    assert isinstance(one.call(1).exception(60), errors.StoreUnavailableError)
    after_first = bits_of(one.model)
    if on_error == "raise":
        with pytest.raises(errors.StoreUnavailableError):
            one.publisher.flush()
    one.publish(2)
    assert same(recompute(one.store)[1].state, after_first)
    one.assert_head_is(2)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_an_unknown_outcome_is_not_forgotten_while_the_store_is_down(
    begin: Begin, on_error: str
) -> None:
    one = begin(on_error=on_error)

    def go_down() -> None:
        one.faulty.down = True

    one.faulty.add(Fault("lose-reply", "manifests/"), Fault(go_down, "manifests/"))
    assert isinstance(one.call(1).exception(60), errors.StoreUnavailableError)
    after_first = bits_of(one.model)
    refused = pytest.raises(errors.StoreUnavailableError) if on_error == "raise" else nullcontext()
    for step in (2, 3):  # still down: each call fails as the first did, or who waits for it
        with refused:
            assert isinstance(one.call(step).exception(20), errors.StoreUnavailableError)
    one.faulty.mend()
    one.publish(4)
    assert same(recompute(one.store)[1].state, after_first)
    one.assert_head_is(2)


@pytest.mark.full
def test_a_hint_that_can_not_be_written_fails_nothing(begin: Begin) -> None:
    one = begin()
    actions: tuple[Action, ...] = ("refuse", "fail", "full", "lose-reply")
    for step, action in enumerate(actions, 1):
        one.faulty.add(Fault(action, HEAD_KEY))
        one.publish(step)
        one.assert_head_is(step)


@pytest.mark.parametrize("prefix", ["anchors/", "edges/"])
def test_an_anchor_that_can_not_be_added_fails_nothing(
    begin: Begin, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = begin(anchor_factor=0.001)
    one.faulty.add(Fault("fail", prefix))
    one.publish(1)
    assert "no anchor yet" in caplog.text
    one.publish(2)
    assert [found.anchored for found in recompute(one.store).values()] == [False, False, True]


# Two publishers


def test_a_publisher_that_was_taken_over_stays_fenced_and_says_so(begin: Begin) -> None:
    fenced, owner = begin(), begin()
    assert (owner.publisher.version, owner.publisher.epoch) == (1, 1)
    future = fenced.call(1)
    for step in (2, 3):
        with pytest.raises(errors.PublisherFencedError, match="another publisher"):
            fenced.publish(step)
        owner.publish(10 + step)
    assert isinstance(future.exception(0), errors.PublisherFencedError)
    owner.assert_head_is(3)


def test_a_publisher_fenced_between_upload_and_commit_commits_nothing(begin: Begin) -> None:
    fenced = begin()
    fenced.faulty.add(Fault(begin, "manifests/"))
    with pytest.raises(errors.PublisherFencedError):
        fenced.publish(1)
    assert_head_is(plain_model(), 1, fenced.store)


def test_an_unknown_outcome_that_another_publisher_decided_is_fenced(begin: Begin) -> None:
    fenced = begin()
    fenced.faulty.add(Fault("fail", "manifests/"))
    with pytest.raises(errors.StoreUnavailableError):
        fenced.publish(1)
    owner = begin()
    with pytest.raises(errors.PublisherFencedError):
        fenced.publish(2)
    owner.assert_head_is(1)


def test_missing_permission_is_not_mistaken_for_an_unknown_outcome(begin: Begin) -> None:
    one = begin()
    one.faulty.add(Fault("refuse", "manifests/"))
    with pytest.raises(errors.StorePermissionError):
        one.publish(1)
    one.faulty.add(Fault("fail", "deltas/"))
    with pytest.raises(errors.StoreUnavailableError):
        one.publish(2)
    one.publish(3)
    one.assert_head_is(1)
