"""Push the checkpoints of any trainer as versions, and inspect a delta.

Needs ``pip install 'deltachain[torch]'``::

    python examples/07_checkpoints.py

Prints the tensors of a delta, and whether every bit that is pulled is the checkpoint's. The same
from a shell: deltachain push CHECKPOINT URL; deltachain pull URL --out DIR.
"""

import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from deltachain import Chain, open_store
from deltachain.cli.pull import pull
from deltachain.cli.push import push


def checkpoint(folder: Path, step: int) -> Path:
    """Write a checkpoint, in place of a trainer."""
    torch.manual_seed(0)
    weight = torch.randn(512, 256).bfloat16()
    changed = torch.rand(weight.shape, generator=torch.Generator().manual_seed(step)) < 0.01
    weight[changed] *= 1 + step / 16
    folder.mkdir()
    tensors = {"layer.weight": weight, "layer.bias": torch.zeros(512)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        url = f"{scratch}/policy"
        for step in range(3):
            # `raw` opens in any safetensors reader; `step`, the default, has a fifth of its size.
            folder = checkpoint(Path(scratch) / f"step-{step}", step)
            push(folder, url, encoding="raw", step=step)

        chain = Chain.open(open_store(url))
        head = chain.head()
        assert head is not None
        (part,) = head.manifest.edge.parts
        with safe_open(f"{url}/{part.key}", "pt") as delta:
            for name in delta.keys():
                print(f"{name:<24} {tuple(delta.get_tensor(name).shape)}")

        pull(url, out=Path(scratch) / "pulled")
        pulled = load_file(Path(scratch) / "pulled" / "model.safetensors")
        last = load_file(Path(scratch) / "step-2" / "model.safetensors")
        assert all(torch.equal(pulled[name], last[name]) for name in last)
        print(f"version {head.version}: every bit is the checkpoint's")


if __name__ == "__main__":
    main()
