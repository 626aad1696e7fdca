"""Folders that may not be written to, and processes without descriptors: typed, and healed."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
from safetensors.torch import load_file

from deltachain.errors import ApplyError, DeltaChainError
from deltachain.subscribe import Subscriber
from tests.support.models import State, TinyModel, bits_of, same

Subscribe = Callable[..., Subscriber]
NOBODY = 65534


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder that this process may only look into; root is nobody meanwhile."""
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


@contextmanager
def no_descriptors(_: Path) -> Iterator[None]:
    """No file can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder whose parents everybody may walk through."""
    folder = Path(tempfile.mkdtemp(prefix="deltachain-rights-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.usefixtures("publisher")
@pytest.mark.parametrize("trouble", [read_only, no_descriptors])
@pytest.mark.parametrize("below", [".", "mirror"])
def test_a_folder_that_cannot_be_written_to_is_said_and_healed(
    subscribe: Subscribe,
    model: TinyModel,
    place: Path,
    trouble: Callable[[Path], Iterator[None]],
    below: str,
) -> None:
    subscriber = subscribe(place / below)
    with trouble(place), pytest.raises(ApplyError) as caught:  # type: ignore[attr-defined]
        subscriber.update()
    assert caught.value.hint
    assert str(place) in str(caught.value)
    subscriber.update()
    assert same(subscriber_bits(place / below), bits_of(model))


def test_following_survives_it(
    subscribe: Subscribe, publish: Callable[..., None], model: TinyModel, place: Path
) -> None:
    publish(1)
    subscriber, stop = subscribe(place), Event()
    troubles: list[DeltaChainError] = []

    def looked(trouble: DeltaChainError | None) -> None:
        if trouble is not None:
            troubles.append(trouble)
            held.close_soon()

    class Held:
        """The folder, read-only until something was said of it."""

        def __init__(self) -> None:
            self.context = read_only(place)
            self.context.__enter__()

        def close_soon(self) -> None:
            self.context.__exit__(None, None, None)

    held = Held()
    for receipt in subscriber.follow(stop=stop, looked=looked):
        assert receipt.version == 1
        stop.set()
    assert [type(trouble) for trouble in troubles] == [ApplyError]
    assert same(subscriber_bits(place), bits_of(model))


def subscriber_bits(folder: Path) -> State:
    return bits_of(load_file(folder / "model.safetensors"))
