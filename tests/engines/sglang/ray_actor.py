"""An ``Engine`` in a Ray actor, which follows a chain in the background."""

import asyncio
import os
from pathlib import Path

os.environ |= {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
}

import sglang
from sglang.srt.managers.io_struct import CheckWeightsReqInput

import deltachain_sglang
from tests.engines.expected import sharded
from tests.engines.sglang.offline import ASKED, SETTINGS
from tests.engines.sglang.server import checksums, digest


class Follower:
    def __init__(self, base: str) -> None:
        self.base = base

    async def follow(self, url: str) -> None:
        self.engine = sglang.Engine(model_path=self.base, **SETTINGS)
        self.leader = await asyncio.to_thread(deltachain_sglang.follow, self.engine, url)

    async def seen(self, version: int, checkpoint: Path) -> tuple[str, bool]:
        while (label := await self.label()) != str(version):
            assert not self.leader.ended, self.leader.ended
        asked = CheckWeightsReqInput(action="checksum")
        _, _, ranks, _ = await self.engine.tokenizer_manager.check_weights(asked)
        cut = sharded(checkpoint)
        return label, checksums(ranks) == {name: digest(bits) for name, bits in cut.items()}

    async def label(self) -> str:
        return (await self.sample(ASKED["input_ids"]))[0]

    async def sample(self, prompt: list[int]) -> tuple[str, list[int]]:
        found = await self.engine.async_generate(**{**ASKED, "input_ids": prompt})
        return str(found["meta_info"]["weight_versions"][-1]["version"]), found["output_ids"]
