"""A stock ``vllm serve``; see :class:`tests.engines.serving.Server`."""

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from tests.engines.serving import HOST, MODEL, Generated, Options, Server, alike, answers, lines

EXTENSIONS: Final[Mapping[str, str]] = {
    "stock": "deltachain_vllm.WorkerExtension",
    "strikes": "tests.engines.vllm.strikes.WorkerExtension",
    "plain": "tests.engines.vllm.plain.WorkerExtension",
}


class VllmServer(Server):
    prefix = "/v1/deltachain"
    late = "DP Coordinator process failed to report ZMQ addresses"

    def command(self, checkpoint: Path, options: Options) -> list[str]:
        kind = "plain" if options.plain else "strikes" if options.strikes else "stock"
        whole = ["--enforce-eager", "--weight-transfer-config", '{"backend":"deltachain"}']
        return [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint)),
            *("--host", HOST, "--port", str(self.port), "--served-model-name", MODEL),
            *("--dtype", "bfloat16", "--max-model-len", "512"),
            *("--max-num-seqs", str(options.requests), "--enable-scale-out"),
            *("--tensor-parallel-size", str(options.tp)),
            *("--data-parallel-size", str(options.dp)),
            *("--worker-extension-cls", EXTENSIONS["stock" if options.bare else kind]),
            *([] if options.bare else whole),
            *(("--api-key", options.key) if options.key else ()),
        ]

    def variables(self, options: Options) -> dict[str, str]:
        found = {
            # Ranks bound to one core wait for one another where a client has that core.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if options.bare:
            found["DELTACHAIN_STRICT"] = "0"
        else:
            found["VLLM_PLUGINS"] = "deltachain,deltachain_http"
        if options.dev:
            found["VLLM_SERVER_DEV_MODE"] = "1"
        return found

    def generate(self, prompt: Sequence[int], length: int, adapter: str = "") -> Generated:
        body = {
            "model": adapter or MODEL,
            "token_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_tokens": length, "ignore_eos": True},
        }
        response = self.client.post("/inference/v1/generate", json=body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        return Generated(
            prompt=tuple(prompt),
            tokens=tuple(choice["token_ids"] or ()),
            finish=choice["finish_reason"],
            spans=tuple(
                (span["start"], span["end"], span["version"])
                for span in choice.get("weight_versions") or ()
            ),
        )

    def stream(self, prompt: Sequence[int], length: int) -> tuple[int, str]:
        body = {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        count, reason = 0, ""
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            for found in lines(response):
                (choice,) = found["choices"]
                count += len(choice["token_ids"] or ())
                reason = choice["finish_reason"] or reason
        # vLLM streams no chunk without a token before there was one, not even the last.
        return count, reason or ("" if count else "abort")

    def checksums(self) -> dict[str, str]:
        response = self.client.post("/weight_checker", json={"action": "checksum"})
        assert response.status_code == 200, response.text
        found = response.json()["checksums"].items()
        return alike((name.partition(":pcp0:")[2], digest) for name, digest in found)

    def digest(self, tensor: Tensor) -> str:
        return digest(tensor)

    def drafted(self) -> float:
        """Return the share of drafted tokens that are accepted in some answers."""
        before = self._counted()
        answers(self, 8)
        made, accepted = (new - old for new, old in zip(self._counted(), before, strict=True))
        return accepted / made

    def _counted(self) -> list[float]:
        text = self.client.get("/metrics").text
        names = ("draft", "accepted")
        found = [re.findall(rf"num_{one}_tokens_total\{{.* (\S+)", text) for one in names]
        return [sum(map(float, each)) for each in found]

    def named(self) -> str:
        return str(self.client.get("/weight_info").json()["weight_version"])

    def halt(self) -> None:
        assert self.client.post("/pause?mode=keep").status_code == 200

    def go_on(self) -> None:
        assert self.client.post("/resume").status_code == 200

    def sleep(self, level: str) -> None:
        answer = self.client.post(f"/sleep?level={level}")
        assert answer.status_code == 200, answer.text

    def wake(self) -> None:
        assert self.client.post("/wake_up").status_code == 200

    def paused(self) -> bool:
        return bool(self.client.get("/is_paused").json()["is_paused"])

    def reset(self) -> None:
        answer = self.client.post("/weight_checker", json={"action": "reset"})
        assert answer.status_code == 200, answer.text

    def load(self, checkpoint: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
        answer = self.client.post("/collective_rpc", json=body)
        assert answer.status_code == 200, answer.text

    def flush(self) -> None:
        assert self.client.post("/reset_prefix_cache").status_code == 200

    def restarts(self) -> int:
        told = self.client.get("/metrics").text
        found = re.search(r"^vllm:num_preemptions_total\S* (\S+)", told, re.MULTILINE)
        assert found
        return int(float(found[1]))


def digest(tensor: Tensor) -> str:
    flat = tensor.contiguous().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
