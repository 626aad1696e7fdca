"""A followed folder whose weights were cut, or that was removed: it is filled again."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from fcntl import LOCK_EX, LOCK_NB
from pathlib import Path
from threading import Event

import pytest

from deltachain.errors import DeltaChainError
from deltachain.subscribe import Subscriber
from deltachain.subscribe.targets.folder import LOCK_FILE

Subscribe = Callable[..., Subscriber]


def follow_until_ready(subscriber: Subscriber, version: int) -> None:
    """Follow until a version is held, through any number of failures."""
    stop, looks = Event(), itertools.count()

    def looked(_: DeltaChainError | None) -> None:
        if subscriber.version == version or next(looks) > 20:
            stop.set()
            subscriber.notify()

    for _ in subscriber.follow(stop=stop, looked=looked):
        pass


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("size", [0, 100])
def test_a_cut_weights_file_is_written_anew(
    subscriber: Subscriber, subscribe: Subscribe, mirror: Path, size: int, *, restarted: bool
) -> None:
    os.truncate(mirror / "model.safetensors", size)
    assert not subscriber.scrub(if_altered=True)
    assert subscriber.poisoned
    if restarted:
        subscriber.close()
        subscriber = subscribe(mirror)
    follow_until_ready(subscriber, 2)
    assert subscriber.version == 2
    assert subscriber.scrub()


def test_a_removed_folder_is_made_and_locked_again(subscriber: Subscriber, mirror: Path) -> None:
    shutil.rmtree(mirror)
    follow_until_ready(subscriber, 2)
    assert subscriber.version == 2
    assert subscriber.scrub()
    code = f"import fcntl; fcntl.lockf(open({str(mirror / LOCK_FILE)!r}, 'w'), {LOCK_EX | LOCK_NB})"
    other = subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.PIPE)
    assert b"BlockingIOError" in other.stderr
