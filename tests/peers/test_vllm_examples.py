"""vLLM's own examples of its interface for trainers, with our backend and what a CPU asks for."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from examples.demo.online.processes import free_port
from tests.engines.expected import sharded
from tests.engines.serving import ROOT, alike
from tests.engines.trainer import Run
from tests.engines.vllm.server import digest
from tests.peers.sources import VLLM

pytestmark = pytest.mark.peers

PLAIN: Final = "tests.engines.vllm.plain.WorkerExtension"  # its linears have checksums on a CPU

BACKEND: Final = {
    r"from vllm\S+ import \w+TrainerInitInfo": "from deltachain_vllm import DeltaChainTrainerInit",
    r"init_info=\w+TrainerInitInfo\(.*?(?=\s+client=)": "init_info=DeltaChainTrainerInit(URL),",
}
SERVED: Final = {
    **BACKEND,
    r'"backend": "\w+"': '"backend": "deltachain"',
    r'(?="--weight-transfer-config",)': f'"--worker-extension-cls", "{PLAIN}", ',
    r'"--load-format",\s+"dummy",': "",  # refused
    r"(MODEL_NAME = ).*": r"\1BASE",
    r"MODEL_NAME(?=, dtype)": "TRAINED",
    r"(SERVER_PORT = )8000": r"\1PORT",
    r"( +)(pause_generation\(BASE_URL\))": r"\1said()\n\1\2",
    r"( +)(resume_generation\(BASE_URL\))": r"\1\2\n\1said()",
    r"(?=def main)": """def said():
    asked = requests.post(f"{BASE_URL}/weight_checker", json={"action": "checksum"})
    print("WEIGHTS", json.dumps(asked.json()["checksums"]))

""",
    # on a CPU
    r'"--device-ids",\s+SERVER_DEVICE_IDS,': "",
    r"torch.accelerator.set_device_index\(TRAINER_DEVICE\)": "",
    r'"cuda:\d"': '"cpu"',
}
FP8: Final = {r'"--quantization",\s+"fp8",': ""}  # vLLM has no kernels for it on a CPU
ACTORS: Final = {
    **BACKEND,
    r'backend="nccl"': 'backend="deltachain"',
    r"(    )(async def do_generate)": """    async def subscribe(self):
        self.subscriber = deltachain_vllm.subscribe(self, URL)

    async def init_weight_transfer_engine(self, request): ...

    async def update_weights(self, request):
        await asyncio.to_thread(self.subscriber.update, request.update_info["version"])

    async def said(self):
        print("WEIGHTS", json.dumps(*await self.collective_rpc("compute_weight_checksums")))

\\1\\2""",
    r"(?=ray.get\(train_model.init_weight)": "ray.get(llm.subscribe.remote())\n",
    r"(MODEL_NAME_V1 = ).*": r"\1BASE",
    r"(MODEL_NAME_V2 = ).*": r"\1TRAINED",
    r"(?=ray.get\(train_model.broadcast)": "ray.get(llm.said.remote())\n",
    r"(?<=\n)(?=results = )": "ray.get(llm.said.remote())\n",
    # on a CPU
    r"num_gpus=1": "num_cpus=1",
    r'"cuda:0"': '"cpu"',
    r"temperature=0": "temperature=0, ignore_eos=True",  # a tiny model's answers are short
    r"max_model_len=8192": f'max_model_len=256, worker_extension_cls="{PLAIN}"',
    r'distributed_executor_backend="ray",': "",
    r"attention_backend=ATTN_BACKEND,": "",
    r'(BATCH_INVARIANT"] = )"1"': r'\1"0"',
}


@pytest.mark.parametrize(
    ("name", "changes", "tp"),
    [
        ("rlhf_http_ipc.py", SERVED, 1),
        ("rlhf_http_nccl.py", SERVED | FP8, 2),
        ("rlhf_async_new_apis.py", ACTORS, 1),
    ],
)
def test_an_example_of_vllm_gives_its_engine_the_bits_of_its_trainer(
    name: str, changes: dict[str, str], tp: int, tmp_path: Path
) -> None:
    trained = Run(tmp_path)
    trained.step()
    base, saved, url = trained.base, trained.saved(), (tmp_path / "chain").as_uri()
    given = {"URL": url, "BASE": str(base), "TRAINED": str(saved), "PORT": free_port()}
    text = VLLM.path("examples/rl", name).read_text()
    for old, new in changes.items():
        text, count = re.subn(old, new, text, flags=re.DOTALL if "?(" in old else re.NOFLAG)
        assert count, old
    program, log = tmp_path / name, tmp_path / "log"
    named = "".join(f"{one} = {value!r}\n" for one, value in given.items())
    program.write_text(f"import json\nimport deltachain_vllm\n{named}{text}")
    ones = ("HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS")
    environment = {
        **os.environ,
        **dict.fromkeys(ones, "1"),
        "RAY_memory_monitor_refresh_ms": "0",  # a busy machine's memory is not theirs alone
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_PLUGINS": "deltachain,deltachain_http",
        "DELTACHAIN_URL": url,
        "PATH": f"{ROOT}/.venv-vllm/bin:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT}/vllm_ext",
    }
    with log.open("w") as out:
        ran = [sys.executable, str(program)]
        done = subprocess.run(ran, env=environment, stdout=out, stderr=out, check=False)
    assert done.returncode == 0, log.read_text()[-5000:]
    found = [json.loads(one) for one in re.findall(r"WEIGHTS (.*)", log.read_text())]
    held = [alike((n.partition(":pcp0:")[2], one) for n, one in each.items()) for each in found]
    assert held == [
        {n: digest(bits) for n, bits in sharded(checkpoint, tp).items()}
        for checkpoint in (base, saved)
    ]
