"""A torch loop publishes every step; another model follows it bit for bit.

Needs ``pip install 'deltachain[torch]'``::

    python examples/01_torch.py

Prints the receipt of the replica, and whether every bit of it is the trainer's.
"""

import tempfile

import torch
from torch import nn

import deltachain


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))


def main() -> None:
    with tempfile.TemporaryDirectory() as url:  # or s3://bucket/run-1, hf://buckets/me/policy
        trained = model()
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-6)
        attachment = deltachain.attach(trained, optimizer, url=url, dtype="BF16")

        for _ in range(5):
            x = torch.randn(32, 256)
            (trained(x) - x).square().mean().backward()
            optimizer.step()  # publishes: training waits for the diff alone
            optimizer.zero_grad()
        attachment.detach()

        # On any machine, at any time: a replica that starts from the same checkpoint, or nothing.
        replica = model().bfloat16()
        with deltachain.Subscriber(url, replica) as subscriber:
            receipt = subscriber.update()
        print(receipt)

        for (name, mine), theirs in zip(
            replica.named_parameters(), trained.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs.to(torch.bfloat16)), name
        print(f"version {subscriber.version}: every bit is the trainer's")


if __name__ == "__main__":
    main()
