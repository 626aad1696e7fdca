"""An offline ``LLM`` that follows a trained chain, version by version: ``python -m`` this module.

Run as a process of its own, because vLLM leaves process groups behind; what it saw is printed as
one line of JSON.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from deltachain.cli.pull import pull
from deltachain.errors import ConfigError, DeltaChainError
from deltachain.replica.target import ReplicaTarget

PROMPTS: Final = 6
LENGTH: Final = 12

_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "deltachain",
}

# Eager engines on a CPU do not warm up, in which a stage makes what it receives into.
_COMPILED: Final = {"compilation_config": {"mode": 3, "backend": "eager"}}


@dataclass(slots=True)
class Seen:
    """What one run saw."""

    classes: dict[str, int] = field(default_factory=dict)
    held: int | None = None
    wrong: dict[int, list[list[str]]] = field(default_factory=dict)
    unlike: dict[int, list[int]] = field(default_factory=dict)
    named: dict[int, str] = field(default_factory=dict)
    stale: dict[int, list[int]] = field(default_factory=dict)
    back: dict[int, list[list[str]]] = field(default_factory=dict)
    scrubbed: list[bool] = field(default_factory=list)
    refused: str = ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("base", type=Path)
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", action="store_true")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--attach", action="store_true")
    asked = parser.parse_args()
    os.environ.update(_ENVIRONMENT)
    ranks = asked.tp * asked.pp
    if ranks == 1:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
    else:
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND="|".join(map(str, range(ranks))))
    with tempfile.TemporaryDirectory() as scratch:
        judge = _Judge(asked.url, Path(scratch))
        parallel = {
            "tensor_parallel_size": asked.tp,
            "pipeline_parallel_size": asked.pp,
            "enable_expert_parallel": asked.ep,
            "distributed_executor_backend": "uni" if ranks == 1 else "mp",
            **(_COMPILED if asked.pp > 1 else {"enforce_eager": True}),
        }
        with _llm(asked.base, parallel, stock=asked.stock, lora=asked.lora) as llm:
            if asked.attach:
                sys.stdout.write(json.dumps(attach(llm, asked.url)) + "\n")
                return
            seen = follow(
                llm, judge, asked.versions, exact=asked.tp == 1 or asked.ep, stock=asked.stock
            )
    sys.stdout.write(json.dumps(asdict(seen)) + "\n")


def attach(llm: Any, url: str) -> dict[str, Any]:
    import deltachain_vllm  # noqa: PLC0415

    before, refusal = _generate(llm), ""
    try:
        deltachain_vllm.subscribe(llm, url).update()
    except DeltaChainError as exc:
        refusal = f"{type(exc).__name__}: {exc}"
    return {"refusal": refusal, "same": _generate(llm) == before}


def follow(llm: Any, judge: "_Judge", last: int, *, exact: bool, stock: bool) -> Seen:
    import deltachain_vllm  # noqa: PLC0415

    seen = Seen()
    subscriber = deltachain_vllm.subscribe(llm, judge.url)
    target = subscriber.target
    assert isinstance(target, ReplicaTarget)
    subscriber.open()
    seen.held = subscriber.version
    seen.classes = {kind: row["tensors"] for kind, row in target.classes().items()}
    for version in range(1, last + 1):
        subscriber.update(version)
        checkpoint = judge.checkpoint(version)
        if not stock:
            seen.wrong[version] = llm.collective_rpc("tests_wrong", args=(str(checkpoint),))
        tokens = _generate(llm)
        if exact:
            seen.unlike[version] = judge.unlike(checkpoint, tokens)
            seen.stale[version] = judge.unlike(judge.checkpoint(version - 1), tokens)
        seen.named[version] = llm.llm_engine.get_weight_version()
    for version in (last - 1, last - 2, 0):
        subscriber.rollback(version)
        checkpoint = judge.checkpoint(version)
        if not stock:
            seen.back[version] = llm.collective_rpc("tests_wrong", args=(str(checkpoint),))
        seen.scrubbed.append(subscriber.scrub())
    try:
        deltachain_vllm.follow(llm, judge.url)
    except ConfigError as exc:
        seen.refused = str(exc)
    return seen


@contextmanager
def _llm(base: Path, parallel: dict[str, Any], *, stock: bool, lora: bool) -> Iterator[Any]:
    from vllm import LLM  # noqa: PLC0415

    kind = "offline_worker" if stock else "offline_plain"
    yield LLM(
        model=str(base),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        enable_lora=lora,
        **parallel,
        worker_extension_cls=f"tests.engines.vllm.{kind}.WorkerExtension",
    )


def _prompts() -> list[list[int]]:
    return [[(7 * start + 3 * i) % 200 for i in range(20)] for start in range(PROMPTS)]


def _generate(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams  # noqa: PLC0415

    greedy = SamplingParams(max_tokens=LENGTH, temperature=0, detokenize=False, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in _prompts()]
    return [list(done.outputs[0].token_ids) for done in llm.generate(asked, greedy, use_tqdm=False)]


class _Judge:
    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder

    def checkpoint(self, version: int) -> Path:
        folder = self._folder / str(version)
        if not folder.exists():
            pull(self.url, out=folder, version=version)
        return folder

    def unlike(self, checkpoint: Path, tokens: list[list[int]]) -> list[int]:
        from tests.engines.expected import Judge  # noqa: PLC0415

        judge = Judge(checkpoint)
        pairs = zip(_prompts(), tokens, strict=True)
        return [
            number
            for number, (prompt, found) in enumerate(pairs)
            if judge.wrong(prompt, found, range(len(found)))
        ]


if __name__ == "__main__":
    main()
