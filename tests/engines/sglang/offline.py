"""An ``Engine`` in this process that follows a chain: ``python -m`` this module.

Prints one line of JSON; the arguments are the URL, the base, and versions to pull and compare with.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from threading import Thread
from typing import Any

from deltachain.errors import ConfigError

_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
}

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "bfloat16",
    "context_length": 512,
    "max_total_tokens": 8192,
    "mem_fraction_static": 0.6,
    "max_running_requests": 4,
    "disable_cuda_graph": True,
    "log_level": "info",
}

ASKED: dict[str, Any] = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
}


def main(url: str, base: str) -> dict[str, Any]:
    import sglang  # noqa: PLC0415

    import deltachain_sglang  # noqa: PLC0415

    engine = sglang.Engine(model_path=base, **SETTINGS)
    try:
        subscriber = deltachain_sglang.subscribe(engine, url)
        seen: dict[str, Any] = {"labels": [_label(engine)]}
        subscriber.update(2)
        seen["labels"].append(_label(engine))
        seen["scrubbed"] = [subscriber.scrub()]
        subscriber.rollback(1)
        seen["labels"].append(_label(engine))
        seen["scrubbed"].append(subscriber.scrub())
        seen["version"] = subscriber.version
        try:
            deltachain_sglang.follow(engine, url)
        except ConfigError as exc:
            seen["refused"] = str(exc)
        loop = Thread(target=engine.loop.run_forever, daemon=True)
        loop.start()
        leader = deltachain_sglang.follow(engine, url)
        while not (status := leader.status()).ready:
            assert not status.fault
            asyncio.run_coroutine_threadsafe(engine.async_generate(**ASKED), engine.loop).result()
        seen["followed"] = [status.version, leader.scrub()]
        leader.stop()
        engine.loop.call_soon_threadsafe(engine.loop.stop)
        loop.join()
    finally:
        engine.shutdown()
    return seen


def _label(engine: Any) -> str:
    found = engine.generate(**ASKED)
    return str(found["meta_info"]["weight_versions"][-1]["version"])


if __name__ == "__main__":
    os.environ.update(_ENVIRONMENT)
    out = os.dup(1)
    os.dup2(2, 1)  # SGLang's lines are no results
    text = json.dumps(main(*sys.argv[1:3]))
    Path(f"/dev/fd/{out}").write_text(text + "\n")
