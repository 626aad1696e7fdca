"""The engine of Ray Serve LLM, which follows a chain by ``engine_kwargs``: ``python -m`` this module.

What it saw is one line of JSON.
"""

import asyncio
import json
import os
import sys
from typing import Any

os.environ |= {
    "DELTACHAIN_FOLLOW": "1",
    "DELTACHAIN_URL": sys.argv[1],
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "deltachain,deltachain_http",
}

import ray
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.llm import LLMConfig

from deltachain.replica.leader import Leader


async def main(base: str) -> dict[str, Any]:
    config = LLMConfig(
        model_loading_config={"model_id": "tiny", "model_source": base},
        accelerator_config={"kind": "cpu"},
        engine_kwargs={
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 4,
            "worker_extension_cls": "deltachain_vllm.WorkerExtension",
        },
    )
    engine = VLLMEngine(config)
    await engine.start()
    app = await engine.build_asgi_app()
    leader: Leader = app.state.deltachain.leader
    while not (status := leader.status()).ready:
        assert not status.fault, status
        await asyncio.sleep(0.1)
    seen = {"version": status.version, "right": await asyncio.to_thread(leader.scrub)}
    await asyncio.to_thread(leader.stop)
    return seen


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    out = os.dup(1)
    os.dup2(2, 1)
    os.write(out, f"{json.dumps(asyncio.run(main(sys.argv[2])))}\n".encode())
    ray.shutdown()
