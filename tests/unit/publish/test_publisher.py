import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
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
from deltachain.publish import PublishConfig, Publisher, PublishReceipt
from deltachain.store import MemoryStore, open_store
from deltachain.subscribe import Subscriber
from tests.support.faults import Fault, FaultyStore
from tests.support.models import TinyModel, bits_of, plain_model, recompute, same, train_
from tests.support.values import present
from tests.unit.cli.support import invoke

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


def bits(exporter: Exporter) -> dict[str, bytes]:
    return {n: t.view(torch.uint8).numpy().tobytes() for n, t in exporter()}


def test_fp8_weights_and_scales_are_published_bit_by_bit() -> None:
    store, exporter = MemoryStore(), Exporter()
    expected = [bits(exporter)]
    with Publisher(PublishConfig(url="memory://x"), store=store).attach(exporter) as publisher:
        for step in range(1, 6):
            exporter.train_(step)
            expected.append(bits(exporter))
            receipt = publisher.publish(step=step).result(60)
            assert 0 < receipt.nnz < receipt.numel
    for version, truth in zip(recompute(store).values(), expected, strict=True):
        assert {name: b.tobytes() for name, b in version.state.items()} == truth


def test_an_export_is_never_held_whole() -> None:
    exporter = Exporter()
    with Publisher("memory://y", store=MemoryStore()).attach(exporter) as publisher:
        exporter.train_(1)
        publisher.publish().result(60)
    assert exporter.alive <= 3


def test_an_export_that_lacks_a_tensor_publishes_nothing() -> None:
    store, exporter = MemoryStore(), Exporter()
    with Publisher("memory://z", store=store).attach(exporter) as publisher:
        lost = exporter.weights.pop("2.w")
        exporter.train_(1)
        with pytest.raises(ConfigError, match=r"'2\.w\.weight' is gone"):
            publisher.publish()
        exporter.weights["2.w"] = lost
        expected = bits(exporter)
        assert publisher.flush() is not None
    *_, newest = recompute(store).values()
    assert {name: b.tobytes() for name, b in newest.state.items()} == expected


def test_an_export_that_gives_a_name_twice_is_refused() -> None:
    def twice() -> Iterator[tuple[str, Tensor]]:
        yield from 2 * [("w", torch.zeros(2))]

    with pytest.raises(ConfigError, match="'w' twice"):
        Publisher("memory://v", store=MemoryStore()).attach(twice)


@pytest.mark.parametrize("name", ["head.w", "1.w.weight"])
def test_an_export_that_gives_a_further_tensor_publishes_nothing(name: str) -> None:
    store, exporter, further = MemoryStore(), Exporter(), dict[str, Tensor]()

    def export() -> Iterator[tuple[str, Tensor]]:
        yield from exporter()
        yield from further.items()

    with Publisher("memory://t", store=store).attach(export) as publisher:
        further[name] = torch.ones(2)
        exporter.train_(1)
        with pytest.raises(UnsupportedModelError, match=f"{name}'") as caught:
            publisher.publish()
        assert caught.value.hint
        assert publisher.version == 0
        del further[name]
        assert publisher.flush() is not None
    *_, newest = recompute(store).values()
    assert {name: b.tobytes() for name, b in newest.state.items()} == bits(exporter)


def test_an_empty_export_is_refused() -> None:
    with pytest.raises(ConfigError, match="no weights"):
        Publisher("memory://u", store=MemoryStore()).attach(lambda: ())


def scraped(url: str) -> dict[str, float]:
    """Value of every metric; phases by their names."""
    text = httpx.get(url).text
    return {
        one.labels.get("phase", one.name): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_a_publisher_serves_its_figures_until_it_closes(
    store: MemoryStore, attach: "Attach", caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model, faulty = TinyModel(), FaultyStore(store)
    publisher = attach(model, faulty, metrics="0", on_error="warn")
    url = re.findall(r"metrics at (\S+)", caplog.text)[0]
    assert scraped(url)["deltachain_version"] == 0
    train_(model, 1)
    publisher.publish(step=1)
    receipt = present(publisher.flush())
    found = scraped(url)
    assert (found["deltachain_version"], found["deltachain_commits_total"]) == (1, 1)
    assert found["deltachain_published_bytes_total"] == receipt.nbytes
    assert found["diff"] == receipt.diff_s > 0
    assert 0 < found["upload"] <= found["encode"] == receipt.encode_s
    faulty.down = True
    train_(model, 2)
    publisher.publish(step=2)
    publisher.flush()
    assert scraped(url)["deltachain_failures_total"] >= 1
    answer = httpx.get(url.replace("/metrics", "/readyz"))
    assert (answer.status_code, "not ready: " in answer.text) == (503, True)
    faulty.down = False
    train_(model, 3)
    publisher.publish(step=3)
    publisher.flush()
    assert httpx.get(url.replace("/metrics", "/readyz")).text == "ready\n"
    publisher.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_taken_port_is_an_error_before_training_starts(
    attach: "Attach", caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    attach(TinyModel(), metrics="0")
    port = re.findall(r"metrics at \S+:(\d+)/", caplog.text)[0]
    with pytest.raises(DeltaChainError, match=f"cannot be served at .*:{port}"):
        attach(TinyModel(), MemoryStore(), metrics=port)


def test_an_invalid_address_is_an_error_at_once() -> None:
    with pytest.raises(ConfigError, match="no address to serve at"):
        PublishConfig(url="memory://x", metrics="localhost")


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


def publish(url: str, model: nn.Module, encoding: str, versions: int) -> list[PublishReceipt]:
    config = PublishConfig(url=url, encoding=encoding, anchor_factor=1e6)
    with Publisher(config).attach(model) as publisher:
        receipts = []
        for _ in range(versions):
            train(model)
            publisher.publish()
            receipts.append(publisher.flush())
    return [receipt for receipt in receipts if receipt is not None]


def test_followers_read_a_chain_whose_encoding_changes() -> None:
    url, model = "memory://encodings", linear()
    target = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    with Subscriber(url, target) as subscriber:
        receipts = publish(url, model, "step", 2)
        subscriber.update()
        receipts += publish(url, model, "max", 2)
        followed = subscriber.update()
    assert followed is not None
    assert followed.plan.startswith("2 to 5: delta->3")
    for name, weight in model.state_dict().items():
        assert torch.equal(target[name].view(torch.int16), weight.view(torch.int16))
    assert [receipt.encoding for receipt in receipts] == ["step", "step", "max", "max"]
    shown = json.loads(invoke("log", url, "--json").stdout)["versions"][::-1]
    assert [version["encodings"] for version in shown if version["nnz"]] == [
        ["dense"], ["step"], ["step"], ["max"], ["max"],
    ]  # fmt: skip
    assert invoke("verify", url).code == 0


Attach = Callable[..., Publisher]


class Gate:
    """Holds a publish up, in the middle of its commit."""

    def __init__(self, store: MemoryStore, prefix: str = "manifests/", nth: int = 1) -> None:
        self.reached, self.opened = Event(), Event()
        self.store = FaultyStore(store)
        self.fault = Fault(self._hold, prefix, nth=nth)

    def _hold(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)

    def close(self) -> None:
        self.store.add(self.fault)


def receipt_of(publisher: Publisher) -> PublishReceipt:
    return present(publisher.flush())


# Wrong use


def test_publishing_before_attaching_is_refused(store: MemoryStore) -> None:
    with (
        pytest.raises(ConfigError, match="not attached"),
        Publisher("memory://unused", store=store) as publisher,
    ):
        publisher.publish()


def test_attaching_twice_is_refused(attach: Attach) -> None:
    with pytest.raises(ConfigError, match="attached already"):
        attach(plain_model()).attach(plain_model())


@pytest.mark.parametrize(
    "settings",
    [
        {"encoding": "zip"},
        {"when_busy": "drop"},
        {"on_error": "ignore"},
        {"anchor_factor": 0.0},
        {"part_nbytes": 0},
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        PublishConfig(url="memory://unused", **settings)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("metadata", [{"lr": 0.1}, {"run": None}, {1: "a"}])
def test_metadata_that_readers_would_refuse_is_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="metadata") as caught:
        PublishConfig(url="memory://unused", metadata=metadata)
    assert "str(value)" in caught.value.hint


@pytest.mark.parametrize("step", [5.0, "5", float("nan"), torch.tensor(5.0)])
def test_a_step_that_readers_would_refuse_is_refused(
    attach: Attach, store: MemoryStore, step: int
) -> None:
    publisher = attach(plain_model())
    with pytest.raises(ConfigError, match="expected a whole number") as caught:
        publisher.publish(step=step)
    assert caught.value.hint
    assert publisher.publish(step=6).result().version == 1
    recompute(store)


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), True, -(1 << 80)])
def test_a_step_of_any_integer_type_is_committed_as_a_number(
    attach: Attach, store: MemoryStore, step: int
) -> None:
    attach(plain_model()).publish(step=step).result()
    assert Chain.open(store).read(1).manifest.step == int(step)


def test_nothing_is_published_after_closing(store: MemoryStore) -> None:
    model = plain_model()
    publisher = Publisher("memory://unused", store=store).attach(model)
    publisher.close()
    train_(model, 1)
    with pytest.raises(ConfigError, match="closed") as caught:
        publisher.publish(step=1)
    assert "another" in caught.value.hint
    publisher.close()
    assert Chain.open(store).newest(0) == 0


def test_before_attaching_there_is_no_version(store: MemoryStore) -> None:
    with Publisher("memory://unused", store=store) as publisher:
        assert (publisher.version, publisher.epoch, publisher.flush()) == (-1, -1, None)


# One version after another


def test_every_version_is_the_model_as_it_was(attach: Attach, store: MemoryStore) -> None:
    model = TinyModel()
    publisher = attach(model)
    truth = [bits_of(model)]
    for step in range(1, 6):
        train_(model, step)
        truth.append(bits_of(model))
        publisher.publish(step=step)
        publisher.flush()
    found = recompute(store)
    assert sorted(found) == list(range(6))
    assert all(same(found[version].state, truth[version]) for version in found)
    assert [found[v].committed.manifest.step for v in found] == [None, 1, 2, 3, 4, 5]


def test_the_receipt_says_what_was_committed(attach: Attach, store: MemoryStore) -> None:
    model = plain_model()
    publisher = attach(model)
    train_(model, 1)
    receipt = publisher.publish(step=7).result(60)
    manifest = recompute(store)[1].committed.manifest
    assert (receipt.version, receipt.epoch, receipt.kind, receipt.step) == (1, 0, "delta", 7)
    assert str(receipt.state) == manifest.state
    assert (receipt.nnz, receipt.numel) == (manifest.nnz, manifest.numel)
    assert receipt.nbytes == manifest.edge.nbytes > 0
    assert receipt.metrics()["deltachain/version"] == 1.0
    assert receipt.metrics()["deltachain/changed_frac"] == receipt.density == manifest.density
    assert str(receipt).startswith("version 1 delta nnz ")


def test_a_version_without_changes_has_no_objects(attach: Attach, store: MemoryStore) -> None:
    publisher = attach(plain_model())
    publisher.publish()
    assert receipt_of(publisher).nnz == 0
    assert recompute(store)[1].committed.manifest.edge.parts == ()
    assert list(store.list("deltas/")) == []


def test_metadata_is_in_every_manifest(attach: Attach, store: MemoryStore) -> None:
    publisher = attach(plain_model(), metadata={"run": "a"})
    publisher.publish()
    publisher.flush()
    assert [r.committed.manifest.metadata for r in recompute(store).values()] == [{"run": "a"}] * 2


def test_results_can_be_waited_for_one_by_one(attach: Attach) -> None:
    # Nobody flushes: a call is never left to a next one that does not come.
    model = plain_model()
    publisher = attach(model, anchor_factor=0.001)
    for step in range(1, 60):
        train_(model, step)
        assert publisher.publish(step=step).result(60).version == step


def test_frozen_weights_are_in_the_anchor_and_in_no_delta(
    attach: Attach, store: MemoryStore
) -> None:
    model = TinyModel()
    publisher = attach(model)
    train_(model, 1, share=0.2)
    publisher.publish()
    publisher.flush()
    (anchor,) = (Part.from_bytes(store.get(info.key)) for info in store.list("anchors/"))
    (delta,) = (Part.from_bytes(store.get(info.key)) for info in store.list("deltas/"))
    assert set(anchor.rows) - set(delta.rows) == {"frozen.weight"}
    assert same(recompute(store)[1].state, {"frozen.weight": bits_of(model)["frozen.weight"]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_model_of_which_nothing_is_trained_is_compared_whole(
    attach: Attach, store: MemoryStore, dtype: torch.dtype
) -> None:
    average = plain_model()
    average.requires_grad_(False).to(dtype)
    publisher = attach(average)
    for weight in average.parameters():
        weight.data.copy_(torch.randn(weight.shape).to(dtype))  # as averages of weights do
    assert publisher.publish(step=1).result().nnz > 0
    assert same(recompute(store)[1].state, bits_of(average))


@pytest.mark.parametrize("encoding", ["step", "overwrite", "raw"])
@pytest.mark.parametrize("share", [0.01, 0.3])
def test_every_encoding_carries_changes_of_every_density(
    attach: Attach, store: MemoryStore, encoding: str, share: float
) -> None:
    model = TinyModel()
    publisher = attach(model, encoding=encoding)
    train_(model, 1, share=share)
    publisher.publish()
    publisher.flush()
    version = recompute(store)[1]
    assert same(version.state, bits_of(model))
    assert encoding in version.committed.manifest.edge.encodings


@pytest.mark.parametrize("encoding", ["step", "overwrite", "raw"])
def test_a_tensor_that_changed_everywhere_goes_dense(
    attach: Attach, store: MemoryStore, encoding: str
) -> None:
    model = plain_model()
    publisher = attach(model, encoding=encoding)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    publisher.publish()
    publisher.flush()
    version = recompute(store)[1]
    assert same(version.state, bits_of(model))
    dense = "plain" if encoding == "raw" else "dense"
    assert dense in version.committed.manifest.edge.encodings


def test_a_version_is_cut_into_parts_of_bounded_size(attach: Attach, store: MemoryStore) -> None:
    model = TinyModel()
    publisher = attach(model, part_nbytes=64)
    train_(model, 1, share=0.1)
    publisher.publish()
    publisher.flush()
    found = recompute(store)
    assert same(found[1].state, bits_of(model))
    parts = [found[v].committed.manifest.edge.parts for v in (0, 1)]
    assert all(len(each) > 2 for each in parts)
    assert len({ref.key for each in parts for ref in each}) == sum(map(len, parts))


# Several calls while a version is in flight


def test_calls_while_busy_are_covered_by_one_version(store: MemoryStore, attach: Attach) -> None:
    gate, model = Gate(store), plain_model()
    publisher = attach(model, on=gate.store)
    gate.close()
    train_(model, 1)
    first = publisher.publish(step=1)
    assert gate.reached.wait(60)
    covered: list[Future[PublishReceipt]] = []
    for step in (2, 3, 4):
        train_(model, step)
        covered.append(publisher.publish(step=step))
    assert not any(future.done() for future in (first, *covered))
    gate.opened.set()
    assert receipt_of(publisher).version == 2
    assert first.result(0).version == 1
    assert {future.result(0).version for future in covered} == {2}
    assert {future.result(0).step for future in covered} == {4}
    assert same(recompute(store)[2].state, bits_of(model))


def test_a_call_that_finds_nothing_in_flight_covers_those_before_it(
    store: MemoryStore, attach: Attach
) -> None:
    gate, model = Gate(store), plain_model()
    publisher = attach(model, on=gate.store)
    gate.close()
    first = publisher.publish(step=1)
    assert gate.reached.wait(60)
    train_(model, 2)
    second = publisher.publish(step=2)
    gate.opened.set()
    assert first.result(60).version == 1
    train_(model, 3)
    third = publisher.publish(step=3)
    assert third.result(60).version == second.result(60).version == 2
    assert same(recompute(store)[2].state, bits_of(model))


def test_waiting_mode_commits_every_call(store: MemoryStore, attach: Attach) -> None:
    model = plain_model()
    publisher = attach(model, when_busy="wait")
    truth = [bits_of(model)]
    futures = []
    for step in range(1, 6):
        train_(model, step)
        truth.append(bits_of(model))
        futures.append(publisher.publish(step=step))
    publisher.flush()
    assert [future.result(0).version for future in futures] == [1, 2, 3, 4, 5]
    found = recompute(store)
    assert all(same(found[v].state, truth[v]) for v in found)


def test_a_call_that_was_left_may_be_waited_for(store: MemoryStore, attach: Attach) -> None:
    gate = Gate(store)
    model = TinyModel()
    publisher = attach(model, on=gate.store)
    gate.close()
    train_(model, 1)
    first = publisher.publish(step=1)
    assert gate.reached.wait(60)
    train_(model, 2)
    left = publisher.publish(step=2)
    assert not left.running()  # no version has it yet
    gate.opened.set()
    assert left.result().step == 2  # by the thread that would have to call publish again
    assert first.result().version == 1
    assert same(recompute(store)[2].state, bits_of(model))


def test_a_future_that_was_cancelled_does_not_disturb_the_others(
    store: MemoryStore, attach: Attach
) -> None:
    gate, model = Gate(store), plain_model()
    publisher = attach(model, on=gate.store)
    gate.close()
    publisher.publish(step=1)
    assert gate.reached.wait(60)
    train_(model, 2)
    gone, stays = publisher.publish(step=2), publisher.publish(step=3)
    gone.cancel()
    gate.opened.set()
    publisher.flush()
    assert stays.result(0).version == 2
    assert same(recompute(store)[2].state, bits_of(model))


def test_closing_commits_what_is_left(store: MemoryStore) -> None:
    model = plain_model()
    with Publisher("memory://unused", store=store).attach(model) as publisher:
        for step in (1, 2, 3):
            train_(model, step)
            publisher.publish(step=step)
    publisher.close()  # twice is allowed
    found = recompute(store)
    assert same(found[max(found)].state, bits_of(model))
    assert found[max(found)].committed.manifest.step == 3


def test_wrapping_the_model_later_changes_nothing(attach: Attach, store: MemoryStore) -> None:
    model = plain_model()
    publisher = attach(model)
    train_(nn.Sequential(model), 1)
    publisher.publish()
    publisher.flush()
    assert same(recompute(store)[1].state, bits_of(model))
