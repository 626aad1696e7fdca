"""``encoding="auto"``: the link decides, and a choice lasts."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from deltachain import PublishConfig, Publisher, PublishReceipt, Subscriber
from deltachain.chain.upload import MeasuredTransfer, UploadClock
from deltachain.errors import ConfigError
from deltachain.kernels.reference import Changes
from deltachain.publish import encoding_choice
from deltachain.publish import encoding_choice as version_encoding
from deltachain.publish.encoding_choice import (
    TRANSFERS,
    VERSIONS,
    EncodingCost,
    VersionEncoding,
    sample_of,
)
from deltachain.publish.model.source import Weight
from deltachain.publish.wire_form import NO_CHANGES, CheckpointChanges, Diff
from deltachain.store import open_store
from deltachain.types import StateDigest, TensorSpec
from tests.support.faults import Fault, FaultyStore
from tests.unit.cli.support import invoke

SLOW, FAST = MeasuredTransfer(1 << 20, 2.0), MeasuredTransfer(1 << 30, 0.5)
COSTS = {
    "step": EncodingCost(encoding="step", nbytes=1.2, encode_ns=13.0, decode_ns=7.0),
    "max": EncodingCost(encoding="max", nbytes=0.9, encode_ns=50.0, decode_ns=50.0),
}


def changed(numel: int, nnz: int = 1) -> CheckpointChanges:
    spec = TensorSpec(f"w{numel}", "BF16", (numel,))
    weight = Weight.straight(spec, torch.empty(1), frozen=True)
    bits = np.zeros(nnz, np.uint16)
    return CheckpointChanges(weight, spec, Changes(np.arange(nnz), bits, bits), StateDigest())


DIFF = Diff({}, (changed(10),), StateDigest())


@pytest.fixture
def trials() -> Iterator[mock.Mock]:
    """Trials of encodings, with known costs."""

    def cost(name: str, *_: object, **__: object) -> EncodingCost:
        return COSTS[name]

    with mock.patch.object(version_encoding, "try_encoding", side_effect=cost) as tried:
        yield tried


def choose(auto: VersionEncoding, diff: Diff = DIFF) -> str:
    return auto.choose(diff, lambda _: None).encoding


def test_the_first_versions_are_steps(trials: mock.Mock) -> None:
    auto = VersionEncoding("auto")
    auto.add(MeasuredTransfer(1000, 100.0))  # a round trip
    assert [choose(auto) for _ in range(3)] == ["step"] * 3
    trials.assert_not_called()
    auto.add(SLOW)
    assert choose(auto, NO_CHANGES) == "step"
    assert choose(auto) == "max"


def test_a_choice_lasts(trials: mock.Mock) -> None:
    auto = VersionEncoding("auto")
    auto.add(SLOW)
    found = []
    for number in range(3 * VERSIONS):
        found.append(choose(auto))
        auto.add(FAST if number % 2 else SLOW)
    assert found == ["max"] * VERSIONS + ["step"] * 2 * VERSIONS
    assert trials.call_count == 2 + 2 + 1


def test_a_link_that_becomes_slow_is_noticed(trials: mock.Mock) -> None:
    auto = VersionEncoding("auto")
    auto.add(FAST)
    found = []
    for _ in range(VERSIONS + 1):
        found.append(choose(auto))
        auto.add(SLOW)
    assert TRANSFERS <= VERSIONS
    assert found == ["step"] * VERSIONS + ["max"]
    assert trials.call_count == 1 + 2


def test_a_configured_encoding_is_not_tried(trials: mock.Mock) -> None:
    fixed = VersionEncoding("overwrite")
    fixed.add(SLOW)
    assert choose(fixed) == "overwrite"
    trials.assert_not_called()


def test_the_tensor_that_is_tried_has_many_changes_and_is_not_large() -> None:
    found = changed(1000, 3), changed(2000, 9), changed(1 << 25, 50)
    assert sample_of(Diff({}, found, StateDigest())) is found[1]
    assert sample_of(Diff({}, found[2:], StateDigest())) is found[2]
    assert sample_of(NO_CHANGES) is None


def test_uploads_at_the_same_time_count_their_time_once() -> None:
    clock, together = UploadClock(), threading.Barrier(2)

    def upload() -> None:
        with clock.upload(100):
            together.wait(60)
            time.sleep(0.2)

    threads = [threading.Thread(target=upload) for _ in range(2)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.2 <= clock.total.seconds <= time.perf_counter() - start
    assert clock.total.nbytes == 200
    with pytest.raises(ConfigError), clock.upload(100):
        raise ConfigError("refused")
    assert clock.total.nbytes == 200


def linear() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(1024, 512).bfloat16()


def train(model: nn.Module) -> None:
    """Steps of one of some weights, more often of small ones, as optimizers make them."""
    with torch.no_grad():
        for weight in model.parameters():
            bits = weight.view(torch.int16)
            signs = torch.randint(0, 2, bits.shape, dtype=torch.int16) * 2 - 1
            bits += (torch.rand(bits.shape) < 5e-4 / weight.abs()) * signs


def publish(url: str, model: nn.Module, versions: int, *faults: Fault) -> list[PublishReceipt]:
    """Versions of a publisher with ``auto``, over a link with faults."""
    store = FaultyStore(open_store(url), *faults)
    config = PublishConfig(url=url, encoding="auto", anchor_factor=1e6)
    with Publisher(config, store=store).attach(model) as publisher:
        receipts = []
        for _ in range(versions):
            train(model)
            publisher.publish()
            receipts.append(publisher.flush())
    return [receipt for receipt in receipts if receipt is not None]


def test_one_chain_over_a_fast_and_a_slow_link(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deltachain")
    monkeypatch.setattr(encoding_choice, "SMALLEST_TRANSFER", 10_000)
    url, model = "memory://over-a-fast-and-a-slow-link", linear()
    target = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    with Subscriber(url, target) as subscriber:
        fast = publish(url, model, 2)
        subscriber.update()
        slow = publish(url, model, 3, Fault("slow", "deltas/", times=None, seconds=0.5))
        followed = subscriber.update()
    assert followed is not None
    assert followed.plan.startswith("2 to 6: delta->3")
    for name, weight in model.state_dict().items():
        assert torch.equal(target[name].view(torch.int16), weight.view(torch.int16))
    assert [receipt.encoding for receipt in fast] == ["step", "step"]
    assert [receipt.encoding for receipt in slow] == ["step", "max", "max"]
    assert slow[0].encoding_reason == "link not measured yet"
    assert slow[1].encoding_reason.startswith("link of 0.0")
    assert str(slow[1]).endswith(f", max: {slow[1].encoding_reason}")
    assert f"encoding max: {slow[1].encoding_reason}" in caplog.messages
    shown = json.loads(invoke("log", url, "--json").stdout)["versions"][::-1]
    assert [version["encodings"] for version in shown if version["nnz"]] == [
        ["dense"], ["step"], ["step"], ["step"], ["max"], ["max"],
    ]  # fmt: skip
    assert invoke("verify", url).code == 0


def test_a_push_measures_the_chain_that_it_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_choice, "SMALLEST_TRANSFER", 10_000)
    url, model = tmp_path / "chain", linear()
    pushed = []
    for _ in range(2):
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        found = invoke("push", tmp_path / "model.safetensors", url, "--encoding", "auto", "--json")
        pushed.append(json.loads(found.stdout))
        train(model)
    assert pushed[0]["encoding_reason"] == "link not measured yet"
    assert pushed[1]["encoding"] == "step"
    assert "MB/s, step" in pushed[1]["encoding_reason"]
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    shown = invoke("push", tmp_path / "model.safetensors", url, "--encoding", "auto")
    assert "\n   step: link of" in shown.stdout
    again = invoke("push", tmp_path / "model.safetensors", url, "--json")
    assert json.loads(again.stdout)["encoding"] is None
