"""Scripts that end without closing their publisher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deltachain.publish import Publisher
from deltachain.store import MemoryStore, open_store
from tests.crash.child import open_place
from tests.support.models import bits_of, plain_model, recompute, same, train_

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


def run(url: str, way: tuple[str, str], end: str) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(made=way[0].format(url=url), publish=way[1], end=end)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("way", [BY_HAND, BY_STEPS])
@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)])
def test_the_last_version_is_committed(
    tmp_path: Path, way: tuple[str, str], end: str, code: int
) -> None:
    done = run(str(tmp_path), way, end)
    assert done.returncode == code, done.stderr
    assert "Exception ignored" not in done.stderr
    model = plain_model()
    for step in range(1, 5):
        train_(model, step)
    found = recompute(open_store(tmp_path))
    assert found[max(found)].committed.manifest.step == 4
    assert same(found[max(found)].state, bits_of(model))


@pytest.mark.parametrize(("end", "last"), [("", 4), ("raise SystemExit(3)", 4), ("1 / 0", 3)])
def test_steps_after_the_last_version_are_committed_unless_an_error_ends_the_process(
    tmp_path: Path, end: str, last: int
) -> None:
    made = BY_STEPS[0].replace("url=", "every_steps=3, url=")
    done = run(str(tmp_path), (made, BY_STEPS[1]), end)
    assert "Exception ignored" not in done.stderr
    found = recompute(open_store(tmp_path))
    assert found[max(found)].committed.manifest.step == last


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


def test_a_forked_process_commits_nothing(tmp_path: Path) -> None:
    done = run(
        str(tmp_path), BY_HAND, "publisher.flush()\nif os.fork() == 0: raise SystemExit\nos.wait()"
    )
    assert done.returncode == 0, done.stderr
    assert "closing the publisher" not in done.stderr


def test_what_fails_at_the_end_is_told(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    end = f"publisher.flush()\nimport shutil; shutil.rmtree({folder!r})\npublisher.publish(step=9)"
    done = run(folder, BY_HAND, end)
    assert done.returncode == 0, done.stderr
    assert f"closing the publisher at {Path(folder).as_uri()} as Python ended" in done.stderr
    assert "hint" in done.stderr


def test_the_rest_is_a_version_only_if_something_changed() -> None:
    model, store = plain_model(), MemoryStore()
    publisher = Publisher("memory://unused", store=store).attach(model)
    publisher.publish_rest(step=0)
    assert publisher.version == 0
    train_(model, 1)
    publisher.publish_rest(step=1)
    publisher.flush()
    assert (publisher.version, publisher.last.step if publisher.last else None) == (1, 1)
    publisher.publish_rest(step=1)
    publisher.close()
    assert list(recompute(store)) == [0, 1]
    assert same(recompute(store)[1].state, bits_of(model))
