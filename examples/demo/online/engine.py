"""Sampling from a vLLM or SGLang server: tokens with log probabilities and versions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import httpx

EngineKind: TypeAlias = Literal["vllm", "sglang"]

HOST: Final = "127.0.0.1"
MODEL: Final = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Result of one request."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finished: bool


class UnlabelledError(RuntimeError):
    pass


def command(kind: EngineKind, python: Path, checkpoint: Path, port: int) -> list[str]:
    at = ("--host", HOST, "--port", str(port), "--served-model-name", MODEL, "--dtype", "bfloat16")
    if kind == "vllm":
        return [
            *(str(python.with_name("vllm")), "serve", str(checkpoint), *at),
            *("--max-model-len", "256", "--max-num-seqs", "64", "--enforce-eager"),
            *("--enable-scale-out", "--worker-extension-cls", "deltachain_vllm.WorkerExtension"),
            *("--weight-transfer-config", '{"backend":"deltachain"}'),
        ]
    return [
        *(str(python), "-m", "sglang.launch_server", "--model-path", str(checkpoint), *at),
        *("--device", "cpu", "--attention-backend", "torch_native", "--context-length", "256"),
        *("--max-total-tokens", "16384", "--mem-fraction-static", "0.6"),
        *("--max-running-requests", "64", "--disable-cuda-graph", "--skip-server-warmup"),
        "--sleep-on-idle",
    ]


def variables(kind: EngineKind) -> dict[str, str]:
    one = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if kind == "vllm":
        return one | {
            "DO_NOT_TRACK": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_PLUGINS": "deltachain,deltachain_http",
        }
    return one | {"SGLANG_USE_CPU_ENGINE": "1"}


async def sample(
    client: httpx.AsyncClient,
    kind: EngineKind,
    prompt: Sequence[int],
    *,
    length: int,
    stop: Sequence[int],
    seed: int,
) -> Sampled:
    """Sample a completion of a prompt at temperature 1."""
    if kind == "vllm":
        return await _vllm(client, prompt, length, stop, seed)
    return await _sglang(client, prompt, length, stop)


async def _vllm(
    client: httpx.AsyncClient, prompt: Sequence[int], length: int, stop: Sequence[int], seed: int
) -> Sampled:
    sampling = {
        "temperature": 1.0,
        "max_tokens": length,
        "stop_token_ids": list(stop),
        "logprobs": 0,
        "seed": seed,
    }
    body = {"model": MODEL, "token_ids": list(prompt), "sampling_params": sampling}
    answer = (await client.post("/inference/v1/generate", json=body)).raise_for_status().json()
    (choice,) = answer["choices"]
    tokens = choice["token_ids"] or []
    content = (choice["logprobs"] or {}).get("content") or []
    return Sampled(
        tokens=tuple(tokens),
        logprobs=tuple(one["logprob"] for one in content),
        versions=_each(choice["weight_versions"] or (), len(tokens)),
        finished=choice["finish_reason"] in ("stop", "length"),
    )


async def _sglang(
    client: httpx.AsyncClient, prompt: Sequence[int], length: int, stop: Sequence[int]
) -> Sampled:
    sampling = {"temperature": 1.0, "max_new_tokens": length, "stop_token_ids": list(stop)}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
    answer = (await client.post("/generate", json=body)).raise_for_status().json()
    meta, tokens = answer["meta_info"], answer["output_ids"]
    return Sampled(
        tokens=tuple(tokens),
        logprobs=tuple(one[0] for one in meta["output_token_logprobs"]),
        versions=_each(meta["weight_versions"], len(tokens)),
        finished=meta["finish_reason"]["type"] in ("stop", "length"),
    )


def _each(spans: Sequence[dict[str, Any]], count: int) -> tuple[int, ...]:
    found: list[int] = []
    for span in spans:
        if span["start"] != len(found) or not str(span["version"]).isdecimal():
            raise UnlabelledError(f"tokens from {len(found)} on are labelled {span}")
        found += [int(span["version"])] * (span["end"] - span["start"])
    if len(found) != count:
        raise UnlabelledError(f"{len(found)} of {count} tokens have a version")
    return tuple(found)
