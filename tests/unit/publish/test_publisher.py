import json
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor, nn

from deltachain.chain.chain import Chain
from deltachain.chain.upload import UploadClock
from deltachain.codec import Part
from deltachain.errors import ConfigError, DeltaChainError, UnsupportedModelError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore, open_store
from deltachain.subscribe import Subscriber
from tests.support.faults import Fault, FaultyStore
from tests.support.models import TinyModel, bits_of, plain_model, recompute, same
from tests.support.values import present
from tests.unit.cli.support import invoke
from tests.unit.publish.chains import Attach, Begin, Run, head_of, publish, served

BLOCK = 8


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 weights, and a scale for each block of rows."""
    blocks = weight.view(-1, BLOCK, weight.shape[1])
    scale = blocks.abs().amax((1, 2)) / torch.finfo(torch.float8_e4m3fn).max
    return (blocks / scale[:, None, None]).view_as(weight).to(torch.float8_e4m3fn), scale


class Exporter:
    """Makes the tensors of a checkpoint anew each time, out of weights that it trains."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = {f"{n}.w": torch.randn(32, 16, generator=generator) for n in range(3)}
        self.further: dict[str, Tensor] = {}
        self.given: list[weakref.ref[Tensor]] = []
        self.alive = 0

    def train_(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for weight in self.weights.values():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights.items():
            fp8, scale = quantised(weight)
            for suffix, tensor in (("weight", fp8), ("weight_scale_inv", scale)):
                self.alive = max(self.alive, sum(ref() is not None for ref in self.given))
                self.given.append(weakref.ref(tensor))
                yield f"{name}.{suffix}", tensor
            del fp8, scale, tensor
        yield from self.further.items()


def bits(exporter: Exporter) -> dict[str, bytes]:
    return {n: t.view(torch.uint8).numpy().tobytes() for n, t in exporter()}


def test_fp8_weights_and_scales_are_published_bit_by_bit_and_never_held_whole() -> None:
    store, exporter = MemoryStore(), Exporter()
    expected = [bits(exporter)]
    with Publisher("memory://x", store=store).attach(exporter) as publisher:
        for step in range(1, 6):
            exporter.train_(step)
            expected.append(bits(exporter))
            receipt = publisher.publish(step=step).result(60)
            assert 0 < receipt.nnz < receipt.numel
    assert exporter.alive <= 3
    for version, truth in zip(recompute(store).values(), expected, strict=True):
        assert {name: b.tobytes() for name, b in version.state.items()} == truth


@pytest.mark.parametrize(
    ("lost", "further", "error", "why"),
    [
        ("2.w", "", ConfigError, r"'2\.w\.weight' is gone"),
        ("", "head.w", UnsupportedModelError, "head.w'"),
        ("", "1.w.weight", UnsupportedModelError, "1.w.weight'"),
    ],
)
def test_an_export_of_other_tensors_than_before_publishes_nothing(
    lost: str, further: str, error: type[ConfigError], why: str
) -> None:
    store, exporter = MemoryStore(), Exporter()
    with Publisher("memory://z", store=store).attach(exporter) as publisher:
        weights = exporter.weights
        exporter.weights = {name: one for name, one in weights.items() if name != lost}
        exporter.further = {further: torch.ones(2)} if further else {}
        exporter.train_(1)
        with pytest.raises(error, match=why) as caught:
            publisher.publish()
        assert caught.value.hint
        assert publisher.version == 0
        exporter.weights, exporter.further = weights, {}
        expected = bits(exporter)
        assert publisher.flush() is not None
    *_, newest = recompute(store).values()
    assert {name: b.tobytes() for name, b in newest.state.items()} == expected


def scraped(url: str) -> dict[str, float]:
    """Value of every metric; phases by their names."""
    text = httpx.get(url).text
    return {
        one.labels.get("phase", one.name): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_a_publisher_serves_its_figures_until_it_closes(
    store: MemoryStore, attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model, faulty = TinyModel(), FaultyStore(store)
    publisher = attach(model, faulty, metrics="0", on_error="warn")
    url, ready = served(caplog) + "/metrics", served(caplog) + "/readyz"
    assert scraped(url)["deltachain_version"] == 0
    publish(publisher, model, 1)
    receipt = present(publisher.last)
    found = scraped(url)
    assert (found["deltachain_version"], found["deltachain_commits_total"]) == (1, 1)
    assert found["deltachain_published_bytes_total"] == receipt.nbytes
    assert found["diff"] == receipt.diff_s > 0
    assert 0 < found["upload"] <= found["encode"] == receipt.encode_s
    faulty.down = True
    publish(publisher, model, 2)
    assert scraped(url)["deltachain_failures_total"] >= 1
    answer = httpx.get(ready)
    assert (answer.status_code, "not ready: " in answer.text) == (503, True)
    faulty.down = False
    publish(publisher, model, 3)
    assert httpx.get(ready).text == "ready\n"
    publisher.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_taken_port_is_an_error_before_training_starts(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    attach(TinyModel(), metrics="0")
    port = served(caplog).rpartition(":")[2]
    with pytest.raises(DeltaChainError, match=f"cannot be served at .*:{port}"):
        attach(TinyModel(), MemoryStore(), metrics=port)


def test_uploads_at_the_same_time_count_their_time_once() -> None:
    clock, together = UploadClock(), threading.Barrier(2)

    def upload() -> None:
        with clock.upload():
            together.wait(60)
            time.sleep(0.2)

    threads = [threading.Thread(target=upload) for _ in range(2)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.2 <= clock.seconds <= time.perf_counter() - start


def train(model: nn.Module) -> None:
    """Steps of one of some weights, more often of small ones, as optimizers make them."""
    with torch.no_grad():
        for weight in model.parameters():
            bits = weight.view(torch.int16)
            signs = torch.randint(0, 2, bits.shape, dtype=torch.int16) * 2 - 1
            bits += (torch.rand(bits.shape) < 5e-4 / weight.abs()) * signs


def encoded(url: str, model: nn.Module, encoding: str) -> None:
    """Publish two versions in an encoding, which their receipts name."""
    config = PublishConfig(url=url, encoding=encoding, anchor_factor=1e6)
    with Publisher(config).attach(model) as publisher:
        for _ in range(2):
            train(model)
            assert publisher.publish().result().encoding == encoding


def test_followers_read_a_chain_whose_encoding_changes() -> None:
    torch.manual_seed(3)
    url, model = "memory://encodings", nn.Linear(1024, 512).bfloat16()
    target = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    with Subscriber(url, target) as subscriber:
        encoded(url, model, "step")
        subscriber.update()
        encoded(url, model, "max")
        followed = present(subscriber.update())
    assert followed.plan.startswith("2 to 5: delta->3")
    assert same(bits_of(target), bits_of(model))
    shown = json.loads(invoke("log", url, "--json").stdout)["versions"][::-1]
    encodings = [version["encodings"] for version in shown if version["nnz"]]
    assert encodings == [["dense"], ["step"], ["step"], ["max"], ["max"]]
    assert invoke("verify", url).code == 0


class Gate:
    """Holds the first version up, in the middle of its commit, until it is opened."""

    def __init__(self, run: Run) -> None:
        self.reached, self.opened = Event(), Event()
        self.publisher, self.call, self.assert_head_is = run.publisher, run.call, run.assert_head_is
        run.faulty.add(Fault(self._hold, "manifests/"))
        self.first = self.call(1)
        assert self.reached.wait(60)

    def _hold(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)


@pytest.fixture
def gate(begin: Begin) -> Iterator[Gate]:
    made = Gate(begin())
    yield made
    made.opened.set()


# Wrong use


def test_before_attaching_there_is_no_version_and_none_can_be_published(store: MemoryStore) -> None:
    with Publisher("memory://unused", store=store) as publisher:
        assert (publisher.version, publisher.epoch, publisher.flush()) == (-1, -1, None)
        with pytest.raises(ConfigError, match="not attached"):
            publisher.publish()


def test_attaching_twice_is_refused(attach: Attach) -> None:
    with pytest.raises(ConfigError, match="attached already"):
        attach(plain_model()).attach(plain_model())


@pytest.mark.parametrize(
    ("settings", "why", "hint"),
    [
        ({"encoding": "zip"}, "encoding", ""),
        ({"when_busy": "drop"}, "when_busy", ""),
        ({"on_error": "ignore"}, "on_error", ""),
        ({"anchor_factor": 0.0}, "anchor_factor", ""),
        ({"part_nbytes": 0}, "part_nbytes", ""),
        ({"metrics": "localhost"}, "no address to serve at", ""),
        ({"snapshot": "tape"}, "snapshot='tape': expected one of", ""),
        ({"metadata": {"lr": 0.1}}, "metadata", "str(value)"),
        ({"metadata": {"run": None}}, "metadata", "str(value)"),
        ({"metadata": {1: "a"}}, "metadata", "str(value)"),
        (
            {"quantization": "fp3-block"},
            "'fp3-block': no such recipe",
            "int8-row, mxfp4, mxfp8, nvfp4a16",
        ),
        (
            {"quantization": "int8-row", "base": Path("base")},
            "base and quantization exclude each other",
            "",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    settings: dict[str, Any], why: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        PublishConfig(url="memory://unused", **settings)
    assert hint in caught.value.hint


def test_paths_are_text_or_path_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_bytes(b"{}")
    named: Any = "~/files"
    for place in ("~/run-1", tmp_path / "run-2"):
        with Publisher(place) as publisher:
            publisher.attach(plain_model(), assets={"config.json": b"{}"})
        assert (tmp_path / Path(place).name / "chain.json").is_file()
    config = PublishConfig(url=str(tmp_path / "run-3"), assets=named)
    with Publisher(config).attach(plain_model()) as publisher:
        assert dict(Chain.open(open_store(publisher.url)).assets()) == {"config.json": b"{}"}


def test_assets_that_are_no_folder_are_refused(attach: Attach, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent is not a folder") as caught:
        attach(plain_model(), assets=tmp_path / "absent")
    assert caught.value.hint


def test_what_is_no_setting_is_refused() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match="URL or a path"):
        Publisher(nothing)


@pytest.mark.parametrize("thing", [plain_model().state_dict(), 3, None])
def test_what_is_no_model_is_refused(attach: Attach, thing: Any) -> None:
    with pytest.raises(ConfigError, match="neither a module") as caught:
        attach(thing)
    assert "lambda: tensors.items()" in caught.value.hint


@pytest.mark.parametrize("step", [5.0, "5", float("nan"), torch.tensor(5.0)])
def test_a_step_that_readers_would_refuse_is_refused(begin: Begin, step: int) -> None:
    one = begin()
    with pytest.raises(ConfigError, match="expected a whole number") as caught:
        one.publisher.publish(step=step)
    assert caught.value.hint
    one.publish(6)
    one.assert_head_is(1)


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), True, -(1 << 80)])
def test_a_step_of_any_integer_type_is_committed_as_a_number(
    attach: Attach, store: MemoryStore, step: int
) -> None:
    attach(plain_model()).publish(step=step).result()
    assert Chain.open(store).read(1).manifest.step == int(step)


def test_nothing_is_published_after_closing(begin: Begin) -> None:
    one = begin()
    one.publisher.close()
    with pytest.raises(ConfigError, match="closed") as caught:
        one.call(1)
    assert "another" in caught.value.hint
    one.publisher.close()
    assert head_of(one.store).version == 0


# One version after another


@pytest.mark.parametrize("when_busy", ["cover", "wait"])
def test_every_version_is_the_model_as_it_was(begin: Begin, when_busy: str) -> None:
    """If each is waited for, or if each call waits for the one before."""
    one = begin(TinyModel(), when_busy=when_busy)
    truth, futures = [bits_of(one.model)], []
    for step in range(1, 6):
        futures.append(one.call(step))
        truth.append(bits_of(one.model))
        if when_busy == "cover":
            one.publisher.flush()
    one.publisher.flush()
    assert [future.result(0).version for future in futures] == [1, 2, 3, 4, 5]
    found = recompute(one.store)
    assert sorted(found) == list(range(6))
    assert all(same(found[version].state, truth[version]) for version in found)
    assert [found[v].committed.manifest.step for v in found] == [None, 1, 2, 3, 4, 5]


def test_the_receipt_says_what_was_committed(begin: Begin) -> None:
    one = begin(metadata={"run": "a"})
    receipt = one.call(7).result(60)
    first, second = (found.committed.manifest for found in recompute(one.store).values())
    assert (receipt.version, receipt.epoch, receipt.kind, receipt.step) == (1, 0, "delta", 7)
    assert str(receipt.state) == second.state
    assert (receipt.nnz, receipt.numel) == (second.nnz, second.numel)
    assert receipt.nbytes == second.edge.nbytes > 0
    assert receipt.metrics()["deltachain/version"] == 1.0
    assert receipt.metrics()["deltachain/changed_frac"] == receipt.density == second.density
    assert str(receipt).startswith("version 1 delta nnz ")
    assert first.metadata == second.metadata == {"run": "a"}


def test_a_version_without_changes_has_no_objects(begin: Begin) -> None:
    one = begin()
    assert one.publisher.publish().result().nnz == 0
    one.assert_head_is(1)
    assert head_of(one.store).manifest.edge.parts == ()
    assert list(one.store.list("deltas/")) == []


def test_results_can_be_waited_for_one_by_one(begin: Begin) -> None:
    """Nobody flushes: a call is never left to a next one that does not come."""
    one = begin(anchor_factor=0.001)
    for step in range(1, 60):
        assert one.call(step).result(60).version == step


def test_frozen_weights_are_in_the_anchor_and_in_no_delta(begin: Begin, store: MemoryStore) -> None:
    one = begin(TinyModel())
    one.publish(1, share=0.2)
    (anchor,) = (Part.from_bytes(store.get(info.key)) for info in store.list("anchors/"))
    (delta,) = (Part.from_bytes(store.get(info.key)) for info in store.list("deltas/"))
    assert set(anchor.rows) - set(delta.rows) == {"frozen.weight"}
    one.assert_head_is(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_model_of_which_nothing_is_trained_is_compared_whole(
    begin: Begin, dtype: torch.dtype
) -> None:
    average = plain_model()
    average.requires_grad_(False).to(dtype)
    one = begin(average)
    for weight in average.parameters():
        weight.data.copy_(torch.randn(weight.shape).to(dtype))  # as averages of weights do
    assert one.publisher.publish(step=1).result().nnz > 0
    one.assert_head_is(1)


@pytest.mark.parametrize("encoding", ["step", "overwrite", "raw"])
@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_every_encoding_carries_changes_of_every_density(
    begin: Begin, encoding: str, share: float
) -> None:
    """A tensor that changed everywhere goes dense."""
    one = begin(TinyModel(), encoding=encoding)
    if share == 1.0:
        for weight in (one.model.embed.weight, one.model.layer.weight):
            nn.init.normal_(weight)
    one.publish(1, share=share)
    one.assert_head_is(1)
    dense = "plain" if encoding == "raw" else "dense"
    expected = encoding if share < 1 else dense
    assert expected in head_of(one.store).manifest.edge.encodings


def test_a_version_is_cut_into_parts_of_bounded_size(begin: Begin) -> None:
    one = begin(TinyModel(), part_nbytes=64)
    one.publish(1, share=0.1)
    one.assert_head_is(1)
    parts = [found.committed.manifest.edge.parts for found in recompute(one.store).values()]
    assert all(len(each) > 2 for each in parts)
    assert len({ref.key for each in parts for ref in each}) == sum(map(len, parts))


# Several calls while a version is in flight


def test_calls_while_busy_are_covered_by_one_version(gate: Gate) -> None:
    covered = [gate.call(step) for step in (2, 3, 4)]
    assert not any(future.done() for future in (gate.first, *covered))
    gate.opened.set()
    assert present(gate.publisher.flush()).version == 2
    assert gate.first.result(0).version == 1
    assert {future.result(0).version for future in covered} == {2}
    assert {future.result(0).step for future in covered} == {4}
    gate.assert_head_is(2)


def test_a_call_that_finds_nothing_in_flight_covers_those_before_it(gate: Gate) -> None:
    second = gate.call(2)
    gate.opened.set()
    assert gate.first.result(60).version == 1
    third = gate.call(3)
    assert third.result(60).version == second.result(60).version == 2
    gate.assert_head_is(2)


def test_a_call_that_was_left_may_be_waited_for(gate: Gate) -> None:
    left = gate.call(2)
    assert not left.running()  # no version has it yet
    gate.opened.set()
    assert left.result().step == 2  # by the thread that would have to call publish again
    assert gate.first.result().version == 1
    gate.assert_head_is(2)


def test_a_future_that_was_cancelled_does_not_disturb_the_others(gate: Gate) -> None:
    gone, stays = gate.call(2), gate.call(3)
    gone.cancel()
    gate.opened.set()
    gate.publisher.flush()
    assert stays.result(0).version == 2
    gate.assert_head_is(2)


def test_closing_commits_what_is_left(begin: Begin) -> None:
    one = begin()
    for step in (1, 2, 3):
        one.call(step)
    one.publisher.close()
    one.publisher.close()  # twice is allowed
    head = head_of(one.store)
    assert head.manifest.step == 3
    one.assert_head_is(head.version)
