"""Two ranks under FSDP2, each of which publishes its own shards, without a gather of the model.

Needs ``pip install 'deltachain[torch]'``::

    python examples/06_fsdp2.py          # in production: torchrun --nproc-per-node 8 ...

Without ``DELTACHAIN_URL`` the chain is in a temporary folder. Prints the receipt of the last
version, and that of a replica which follows it.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.fsdp import fully_shard

import deltachain


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 130), nn.ReLU(), nn.Linear(130, 64))


def train(rank: int, ranks: int, meeting: str, url: str) -> None:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    model = make()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    config = deltachain.PublishConfig(url=url, dtype="BF16")  # of fp32 masters
    with deltachain.Publisher(config).attach(model) as publisher:  # on every rank
        for step in range(5):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            receipt = publisher.publish(step=step).result()
    if rank == 0:
        print(receipt)
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        url = os.environ.get("DELTACHAIN_URL") or f"{scratch}/policy"
        multiprocessing.spawn(train, args=(2, f"file://{scratch}/meeting", url), nprocs=2)
        replica = make().bfloat16()
        with deltachain.Subscriber(url, replica) as subscriber:
            print(subscriber.update())
            assert subscriber.version == 5


if __name__ == "__main__":
    sys.exit(main())
