"""Publishes and follows with an encoding that an installed package provides; run by a test."""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from deltachain import PublishConfig, Publisher, Subscriber
from deltachain.cli import main
from deltachain.codec import ENCODINGS

STEPS = torch.tensor([1, -1, 2, -300, 300, -32768, 17], dtype=torch.int16)


def run(*args: object) -> None:
    """A command that must succeed."""
    sys.argv = ["deltachain", *map(str, args)]
    code: object = None
    try:
        main()
    except SystemExit as done:
        code = done.code
    assert not code, args


def train(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            bits = weight.view(torch.int16).view(-1)
            bits[torch.randperm(bits.numel())[: STEPS.numel()]] += STEPS


def follow(folder: Path, model: nn.Module) -> None:
    """Three versions from a publisher to a subscriber, bit for bit."""
    replica = {name: torch.zeros_like(bits) for name, bits in model.state_dict().items()}
    url = f"file://{folder}/chain"
    config = PublishConfig(url=url, encoding="acme.zigzag", anchor_factor=1e6)
    with Publisher(config).attach(model) as publisher, Subscriber(url, replica) as subscriber:
        subscriber.update()
        for step in range(3):
            train(model)
            publisher.publish(step=step)
            publisher.flush()
            receipt = subscriber.update()
            assert receipt is not None
            assert receipt.version == step + 1
            for name, bits in model.state_dict().items():
                assert torch.equal(bits.view(torch.int16), replica[name].view(torch.int16))
    run("verify", url)


def push(folder: Path, model: nn.Module) -> None:
    """Checkpoints through every command that writes or reads deltas."""
    option = ("--encoding", "acme.zigzag")
    for name in ("old", "new"):
        (folder / name).mkdir()
        save_file(model.state_dict(), folder / name / "model.safetensors")
        run("push", folder / name, folder / "pushed", *option)
        train(model)
    run("verify", folder / "pushed")
    run("pull", folder / "pushed", "--out", folder / "pulled")
    (delta,) = (folder / "pushed" / "deltas").rglob("*.safetensors")
    shutil.copyfile(delta, folder / "delta")
    run("inspect", folder / "delta")
    expected = load_file(folder / "new" / "model.safetensors")
    found = load_file(next((folder / "pulled").glob("*.safetensors")))
    for tensor, bits in expected.items():
        assert torch.equal(found[tensor].view(torch.int16), bits.view(torch.int16))


if __name__ == "__main__":
    assert {"acme", "acme_zigzag", "os"}.isdisjoint(name for name in ENCODINGS)
    assert not any(name in ENCODINGS for name in ("acme", "acme_zigzag", "os"))
    assert "acme_zigzag" not in sys.modules
    torch.manual_seed(1)
    linear, written = nn.Linear(40, 30).bfloat16(), Path(sys.argv[1])
    follow(written, linear)
    push(written, linear)
    assert "acme_zigzag" in sys.modules
