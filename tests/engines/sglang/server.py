"""A stock SGLang server on the CPU; see :class:`tests.engines.serving.Server`."""

import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
from torch import Tensor

from tests.engines.serving import HOST, MODEL, Generated, Options, Server, alike, lines, prompt


class SglangServer(Server):
    prefix = "/deltachain"
    sees_loads = True

    def command(self, checkpoint: Path, options: Options) -> list[str]:
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint)),
            *("--host", HOST, "--port", str(self.port), "--served-model-name", MODEL),
            *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16"),
            *("--context-length", "512", "--max-total-tokens", "8192"),
            # The line above bounds the pool; here, what others take meanwhile counts as ours.
            *("--mem-fraction-static", "0.6", "--max-running-requests", str(options.requests)),
            # An idle scheduler spins otherwise, beside tests that want the same two cores.
            *("--disable-cuda-graph", "--skip-server-warmup", "--sleep-on-idle"),
            *("--tp-size", str(options.tp), "--dp-size", str(options.dp)),
            *(("--api-key", options.key) if options.key else ()),
        ]

    def variables(self, options: Options) -> dict[str, str]:
        stages = 2 if "--pp-size" in options.arguments else 1
        return {
            "SGLANG_USE_CPU_ENGINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": _cores(options.tp * options.dp * stages),
        }

    def generate(self, prompt: Sequence[int], length: int, adapter: str = "") -> Generated:
        body = {**_body(prompt, length), **({"lora_path": adapter} if adapter else {})}
        response = self.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        found = response.json()
        meta = found["meta_info"]
        return Generated(
            prompt=tuple(prompt),
            tokens=tuple(found["output_ids"]),
            finish=meta["finish_reason"]["type"],
            spans=tuple((s["start"], s["end"], s["version"]) for s in meta["weight_versions"]),
        )

    def stream(self, prompt: Sequence[int], length: int) -> tuple[int, str]:
        count, reason = 0, ""
        body = {**_body(prompt, length), "stream": True}
        with self.client.stream("POST", "/generate", json=body) as response:
            for found in lines(response):
                count = found["meta_info"]["completion_tokens"]
                reason = (found["meta_info"]["finish_reason"] or {}).get("type", reason)
        return count, reason

    def checksums(self) -> dict[str, str]:
        response = self.client.post("/weights_checker", json={"action": "checksum"})
        assert response.status_code == 200, response.text
        return checksums(response.json()["ranks"])

    def digest(self, tensor: Tensor) -> str:
        return digest(tensor)

    def drafted(self) -> float:
        """Return the share of drafted tokens that are accepted in some answers."""
        dice = random.Random(3)
        bodies = [_body(prompt(dice), 24) for _ in range(8)]
        found = [self.client.post("/generate", json=body).json()["meta_info"] for body in bodies]
        return float(mean(one["spec_accept_rate"] for one in found))

    def named(self) -> str:
        return str(self.client.get("/model_info").json()["weight_version"])

    def halt(self) -> None:
        answer = self.client.post("/pause_generation", json={"mode": "retract"})
        assert answer.status_code == 200, answer.text

    def go_on(self) -> None:
        assert self.client.post("/continue_generation", json={}).status_code == 200

    def paused(self) -> bool:
        """Whether its scheduler stands still: it does not say, so a token is asked for."""
        try:
            self.client.post("/generate", json=_body([5], 1), timeout=1)
        except httpx.ReadTimeout:
            return True
        return False

    def reset(self) -> None:
        answer = self.client.post("/weights_checker", json={"action": "reset_tensors"})
        assert answer.status_code == 200, answer.text

    def load(self, checkpoint: Path) -> None:
        answer = self.client.post("/update_weights_from_disk", json={"model_path": str(checkpoint)})
        assert answer.status_code == 200, answer.text

    def flush(self) -> None:
        assert self.client.post("/flush_cache", params={"timeout": 5}).status_code == 200

    def sleep(self, *kinds: str) -> None:
        self._memory("release", kinds)

    def wake(self, *kinds: str) -> None:
        self._memory("resume", kinds)

    def _memory(self, what: str, kinds: Sequence[str]) -> None:
        body = {"tags": list(kinds)} if kinds else {}
        answer = self.client.post(f"/{what}_memory_occupation", json=body)
        assert answer.status_code == 200, answer.text


def checksums(ranks: list[dict[str, Any]]) -> dict[str, str]:
    return alike(
        (f"tp{rank['parallelism_info'][0]['tp_rank']}:{name}", digest)
        for rank in ranks
        for name, digest in rank["checksums"].items()
        if "rotary_emb" not in name
    )


def digest(tensor: Tensor) -> str:
    from sglang.srt.utils.weight_checker import _hash_tensor  # noqa: PLC0415

    return str(_hash_tensor(tensor.contiguous()))


def _body(prompt: Sequence[int], length: int) -> dict[str, object]:
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling}


def _cores(ranks: int) -> str:
    """A core for each rank; servers of two processes that test side by side begin with another."""
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = os.cpu_count() or 1
    return "|".join(str((first + rank) % count) for rank in range(ranks))
