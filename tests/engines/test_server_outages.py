"""What takes a server's store, its processes or its model from it; each test starts its own."""

import json
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Final

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from deltachain.chain.chain import Chain
from deltachain.checkpoint import WEIGHTS_FILE
from deltachain.cli.pull import pull
from deltachain.publish import PublishConfig
from deltachain.publish.push import push
from deltachain.store import open_store
from tests.engines.expected import Judge, holds
from tests.engines.families import named
from tests.engines.replica import Replica, error_of, replicas, serving
from tests.engines.serving import ENGINE, PAUSES, prompt, start
from tests.engines.trainer import Trained, Trainer, train
from tests.support.seaweed import Seaweed

PLAIN: Final = {"vllm": "deepseek_v3_wide", "sglang": "qwen2"}
WITH_HEADS: Final = {"vllm": "deepseek_v3_mtp", "sglang": "mimo"}
"""Families that the engine can generate with on a CPU, without such heads and with them."""


def with_heads(checkpoint: Path, folder: Path, seed: int) -> Path:
    family = named(WITH_HEADS[ENGINE])
    assert family.edit is not None
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(family.said)))
    saved = load_file(folder / WEIGHTS_FILE)
    made = family.edit(saved)
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(made.keys() - saved.keys()):
        made[name] = torch.randn(made[name].shape, generator=generator).to(made[name].dtype)
    save_file(made, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folder


def test_a_checkpoint_with_heads_for_later_tokens_is_followed(tmp_path: Path) -> None:
    url, dice = (tmp_path / "chain").as_uri(), random.Random(3)
    with Trainer(tmp_path / "trainer", family=PLAIN[ENGINE]) as trainer:
        trainer.step()
        folders = [with_heads(trainer.pulled(v), tmp_path / str(v), v) for v in (0, 1)]
    for folder in folders:
        push(open_store(url), folder, PublishConfig(url=url))
    with start(folders[0], tmp_path / "server", url) as server:
        kinds = {kind: row["tensors"] for kind, row in server.status()["classes"].items()}
        saved, plain = (load_file(one / WEIGHTS_FILE) for one in (folders[0], trainer.base))
        heads = saved.keys() - plain.keys()
        assert heads
        assert (kinds["unused"], "refused" in kinds) == (len(heads), False)
        server.update(1)
        answers = [server.generate(prompt(dice), 24) for _ in range(8)]
        assert {answer.spans for answer in answers} == {((0, 24, "1"),)}
        wrong = [
            any(Judge(folder).wrong(a.prompt, a.tokens, range(24)) for a in answers)
            for folder in folders
        ]
        assert wrong == [True, False]
        assert server.post("scrub").json()["version"] == 1


VERSIONS = 8
NO_ANCHOR = 1000


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("chain") / "run"
    return train("qwen2", folder, VERSIONS, anchor_every=NO_ANCHOR, encoding="max")


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_follow_one_by_one_and_over_several_versions(
    chain: Trained, tmp_path: Path, tp: int
) -> None:
    head = Chain.open(open_store(chain.url)).head()
    assert head is not None
    assert "max" in head.manifest.edge.encodings
    with start(chain.base, tmp_path / "server", chain.url, tp=tp, plain=True, dev=True) as server:
        assert server.status()["version"] == VERSIONS  # from version 0, as it started
        assert server.post("rollback", version=0).json()["version"] == 0
        server.post("release")
        for version in (1, 2, 5, VERSIONS):
            pull(chain.url, out=tmp_path / str(version), version=version)
            found = server.update(version)
            assert found["version"] == version
            assert holds(server, tmp_path / str(version), tp)
            assert "anchor" not in str(server.status()["last"])


pytestmark = [pytest.mark.engine, pytest.mark.slow]

AWAY_S = 30.0

FOLLOWING = {"DELTACHAIN_FOLLOW": "1", "DELTACHAIN_POLL_S": "0.2"}

SERVING_ON = {**FOLLOWING, "DELTACHAIN_STRICT": "0"}


@pytest.fixture
def s3(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Seaweed:
    for name, value in seaweed.env().items():
        monkeypatch.setenv(name, value)
    return seaweed


@pytest.mark.parametrize("tp", [1, 2])
def test_a_follower_outlives_a_folder_that_is_away(tmp_path: Path, tp: int) -> None:
    with replicas(tmp_path, tp, environment=FOLLOWING) as replica:
        arrive(replica)
        away = replica.store.with_name("away")
        shutil.move(replica.store, away)
        serves_without_a_store(replica)
        shutil.move(away, replica.store)
        arrive(replica)


def test_a_follower_outlives_a_server_that_is_down(tmp_path: Path, s3: Seaweed) -> None:
    url = s3.url(f"outage/{tmp_path.name}")
    with replicas(tmp_path, url=url, environment=FOLLOWING) as replica:
        arrive(replica)
        s3.kill()
        serves_without_a_store(replica)
        error = error_of(replica.server.post("update"), 503)  # after as long as the store retries
        assert (error["type"], error["retryable"]) == ("StoreUnavailableError", True)
        assert replica.server.status()["trouble"]
        assert replica.serves(replica.trainer.head)
        s3.restart()
        arrive(replica)
        assert replica.server.status()["trouble"] == ""


def test_a_follower_may_start_before_its_store(tmp_path: Path, s3: Seaweed) -> None:
    with Trainer(tmp_path, s3.url(f"early/{tmp_path.name}")) as trainer:
        trainer.step()
        s3.kill()
        with serving(trainer, tmp_path, environment=FOLLOWING) as replica:
            status = replica.server.status()
            assert (status["version"], status["ready"]) == (None, False)
            assert status["trouble"]
            assert replica.has(trainer.base)
            s3.restart()
            replica.server.wait_for(lambda status: status["ready"])
            assert replica.holds(1)
            arrive(replica)


def test_a_server_shuts_down_though_its_store_never_answers(tmp_path: Path, s3: Seaweed) -> None:
    url = s3.url(f"hangs/{tmp_path.name}")
    with replicas(tmp_path, url=url, environment=FOLLOWING) as replica:
        arrive(replica)
        os.kill(s3.pid, signal.SIGSTOP)
        try:
            with suppress(httpx.TimeoutException):
                replica.server.client.post(f"{replica.server.prefix}/update", timeout=2)
            assert replica.serves(1)
            replica.server.stop()  # threads of the store's own end with its deadline, not before
            assert "Application shutdown complete" in replica.server.log()
        finally:
            os.kill(s3.pid, signal.SIGCONT)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_worker_is_killed_in_the_middle_of_a_swap(
    trainer: Trainer, tmp_path: Path, tp: int
) -> None:
    with serving(trainer, tmp_path, tp) as replica:
        server = replica.server
        trainer.step()
        replica.strike("write", nth=4, kill=True)
        with suppress(httpx.TransportError):
            assert server.post("update").status_code >= 400
        assert replica.is_struck()
        deadline = time.monotonic() + 60
        while server.alive and time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                assert server.get("ready").status_code == 503
                with pytest.raises((AssertionError, RuntimeError)):
                    server.stream([5, 6, 7], 4)
            time.sleep(0.5)
        assert not server.alive
    with serving(trainer, tmp_path, tp) as replica:
        assert replica.server.status()["last"]["previous"] == 0
        assert replica.holds(1)
        assert replica.serves(1)


@pytest.mark.parametrize("tp", [1, 2])
def test_another_model_at_the_url_is_refused(trainer: Trainer, tmp_path: Path, tp: int) -> None:
    with (
        Trainer(tmp_path / "other", family="llama") as other,
        serving(trainer, tmp_path, tp, base=other.base, environment=SERVING_ON) as replica,
    ):
        status = replica.server.status()
        assert (status["version"], status["ready"], status["following"]) == (None, False, False)
        assert "have no proven way into this engine" in status["trouble"]
        error = error_of(replica.server.post("update"), 409)
        assert error["type"] == "TensorMismatchError"
        assert "start the engine with the model of this chain" in error["hint"]
        assert replica.has(other.base)
        assert replica.server.generate([5, 6, 7], 4).spans == ((0, 4, "default"),)


def test_a_server_of_another_model_ends(trainer: Trainer, tmp_path: Path) -> None:
    with (
        Trainer(tmp_path / "other", family="llama") as other,
        pytest.raises(RuntimeError, match="have no proven way into this engine") as ended,
        serving(trainer, tmp_path, base=other.base),
    ):
        raise AssertionError("it serves")
    assert "so this server exits" in str(ended.value)
    assert "Traceback" not in str(ended.value)


def test_other_weights_of_the_same_model_are_replaced(trainer: Trainer, tmp_path: Path) -> None:
    trainer.step()
    with (
        Trainer(tmp_path / "other", seed=1) as other,
        serving(trainer, tmp_path, 2, base=other.base) as replica,
    ):
        assert replica.server.status()["last"]["previous"] is None
        assert replica.holds(1)
        assert replica.serves(1)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_late_joiner_finds_an_object_gone(trainer: Trainer, tmp_path: Path, tp: int) -> None:
    for _ in range(3):
        trainer.step()
    payload = next((tmp_path / "chain/deltas").glob(f"{2:020d}-*"))
    shutil.move(payload, tmp_path / "payload")
    with serving(trainer, tmp_path, tp, environment=FOLLOWING) as replica:
        status = replica.server.status()
        assert (status["version"], status["head"], status["ready"]) == (0, 3, False)
        assert status["reason"]
        assert f"{2:020d}" in status["trouble"]
        assert replica.server.get("ready").status_code == 503
        assert replica.holds(0)
        assert replica.generates_with(0)
        assert replica.server.update(1)["version"] == 1
        assert replica.holds(1)
        shutil.move(tmp_path / "payload", payload)
        replica.server.wait_for(lambda status: status["version"] == 3)
        assert replica.holds(3)
        assert replica.serves(3)


@pytest.mark.parametrize("pause", PAUSES)
def test_a_replica_in_doubt_generates_nothing_and_forgets_what_it_cached(
    tmp_path: Path, pause: str
) -> None:
    """Whatever its mode, and though it keeps caches: what is in them is of no version."""
    environment = {"DELTACHAIN_PAUSE": pause}
    with replicas(tmp_path, environment=environment) as replica:
        server, dice = replica.server, random.Random(5)
        server.update(replica.trainer.step())
        prompts = [prompt(dice, 100) for _ in range(4)]
        away = replica.store.with_name("away")
        shutil.move(replica.store, away)
        server.reset()
        for asked in prompts:
            server.generate(asked, 2)
        ended: list[tuple[int, str]] = []
        fresh = [prompt(dice) for _ in range(24)]  # thrice what runs at once: some must wait
        streams = [Thread(target=lambda p=p: ended.append(server.stream(p, 450))) for p in fresh]
        for stream in streams:
            stream.start()
        time.sleep(0.2)
        assert server.post("scrub").status_code == 503
        assert replica.stands_still()
        time.sleep(3)  # clients read what was made before
        so_far = len(ended)
        time.sleep(3)
        assert len(ended) == so_far, "requests came to their end with weights of no version"
        assert so_far < len(streams) or pause == "abort", ended
        shutil.move(away, replica.store)
        server.update()
        for stream in streams:
            stream.join()
        assert replica.holds(1)
        judge = Judge(replica.trainer.pulled(1))
        answers = [server.generate(asked, 16) for asked in prompts]
        assert not any(judge.wrong(a.prompt, a.tokens, range(16)) for a in answers)


def arrive(replica: Replica) -> None:
    version = replica.trainer.step()
    replica.server.wait_for(lambda status: status["version"] == version)
    assert replica.holds(version)
    assert replica.serves(version)


def serves_without_a_store(replica: Replica) -> None:
    version = replica.trainer.head
    deadline = time.monotonic() + AWAY_S
    while time.monotonic() < deadline:
        assert replica.serves(version)
        time.sleep(0.5)
    assert replica.holds(version)
