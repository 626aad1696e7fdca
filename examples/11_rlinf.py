"""RLinf trains a small vision-language-action model under FSDP2; rollouts of it follow in bf16.

Workers of both make their syncers as RLinf's own do, by ``WeightSyncer.create`` of a configuration:
messages name a version, and the weights are in the chain.

Needs ``pip install 'deltachain[torch]' rlinf transformers``::

    python examples/11_rlinf.py

Without ``DELTACHAIN_URL`` the chain is in a temporary folder. Prints a line a step, and one a
rollout: what a late one holds before any message.
"""

import hashlib
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from rlinf.hybrid_engines.weight_syncer import WeightSyncer
from rlinf.scheduler import Cluster, NodePlacementStrategy, Worker
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import SmolVLMConfig, SmolVLMModel

os.environ["RLINF_EXT_MODULE"] = "deltachain.integrations.rlinf"  # adds the type of syncer

IMAGE, ACTION = 3, 7  # token of an image; numbers of an action


class Policy(nn.Module):
    """SmolVLM with random weights, a head for actions, and persistent buffers of their mean."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        both = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        both["num_attention_heads"] = 4
        text = {"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 100, **both}
        vision = {"image_size": 32, "patch_size": 16, **both}
        settings = {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0}
        self.vlm = SmolVLMModel(SmolVLMConfig(text_config=text, vision_config=vision, **settings))
        self.vlm.vision_model.requires_grad_(requires_grad=False)
        self.head = nn.Linear(32, ACTION)
        self.register_buffer("mean", torch.zeros(ACTION))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        hidden = self.vlm(input_ids=words, pixel_values=images).last_hidden_state
        return self.mean + self.head(hidden[:, -1])


def sample(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw four images, instructions, and actions to learn."""
    dice = torch.Generator().manual_seed(seed)
    words = torch.randint(4, 100, (4, 6), generator=dice)
    words[:, 0] = IMAGE
    return torch.rand(4, 1, 3, 32, 32, generator=dice), words, torch.rand(4, ACTION, generator=dice)


def syncer_of(url: str) -> WeightSyncer:
    """Make a syncer as RLinf's stock workers do, of ``cfg.weight_syncer``; masters are in fp32."""
    given = {"type": "deltachain", "deltachain": {"url": url, "dtype": "BF16"}}
    return WeightSyncer.create(OmegaConf.create(given))


def digest(policy: nn.Module) -> str:
    """Hash all tensors, whole and in bf16."""
    found = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        cast = whole.bfloat16() if whole.is_floating_point() else whole
        found.update(name.encode() + cast.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Actor(Worker):
    def prepare(self, url: str) -> None:
        dist.init_process_group("gloo")  # RLinf sets the variables that this reads
        self.policy = Policy(0)
        fully_shard(self.policy)
        trained = [one for one in self.policy.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5)
        self.syncer = syncer_of(url)

    async def step(self, number: int, groups: list[tuple[str, int]]) -> str:
        """Train a step and send its version, as RLinf's ``sync_model_to_rollout``."""
        images, words, actions = sample(2 * number + dist.get_rank())
        (self.policy(images, words) - actions).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(actions)
        self.policy.mean.copy_(actions.mean(0) / dist.get_world_size())
        self.policy.seen += len(actions) * dist.get_world_size()

        async def send(message: Any) -> None:
            if dist.get_rank() == 0:
                await self.broadcast(message, groups=groups, async_op=True).async_wait()

        state = self.policy.state_dict()
        if not self.syncer.sender_initialized():
            await self.syncer.init_sender(state, list(state), send)
        await self.syncer.sync(state, send, number)
        return digest(self.policy)


class Rollout(Worker):
    async def prepare(self, url: str) -> str:
        self.policy, self.syncer = Policy(9).bfloat16(), syncer_of(url)
        await self.syncer.init_receiver(self.policy.state_dict(), None)  # the head, if there is one
        return digest(self.policy)

    async def follow(self, groups: list[tuple[str, int]]) -> tuple[str, int]:
        """Take the next version and act, as RLinf's ``sync_model_from_actor``."""

        async def receive() -> Any:
            return await self.broadcast(None, groups=groups, async_op=True).async_wait()

        version = await self.syncer.apply(self.policy, receive)
        images, words, _ = sample(version)
        with torch.no_grad():
            assert self.policy(images.bfloat16(), words).isfinite().all()
        return digest(self.policy), version


def main() -> None:
    cluster, groups, rollouts, sent = Cluster(num_nodes=1), [("actor", 0)], [], [""]

    def launch(kind: type[Worker], name: str, ranks: int) -> Any:
        where = NodePlacementStrategy([0] * ranks)  # without cards
        return kind.create_group().launch(cluster, name=name, placement_strategy=where)

    with tempfile.TemporaryDirectory() as scratch:
        url = os.environ.get("DELTACHAIN_URL") or f"{scratch}/policy"
        actors = launch(Actor, "actor", 2)
        actors.prepare(url).wait()
        for step in range(1, 21):
            if step in (1, 3):
                rollouts.append(launch(Rollout, f"rollout{step}", 1))
                groups.append((f"rollout{step}", 0))
                (held,) = rollouts[-1].prepare(url).wait()
                print(f"a rollout joins before step {step}: {'right' if held in sent else 'empty'}")
            training, followed = actors.step(step, groups), [one.follow(groups) for one in rollouts]
            sent = training.wait()
            assert {pair for one in followed for pair in one.wait()} == {(sent[0], step)}
            print(f"step {step} on {len(rollouts)} rollouts: every bit is the actor's")


if __name__ == "__main__":
    sys.exit(main())
