"""One chain whose publishers choose different encodings."""

from __future__ import annotations

import json
import threading
import time

import torch
from torch import nn

from deltachain.chain.upload import UploadClock
from deltachain.publish import PublishConfig, Publisher, PublishReceipt
from deltachain.subscribe import Subscriber
from tests.unit.cli.support import invoke


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
