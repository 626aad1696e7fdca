"""Versions of a LoRA adapter in a running vLLM, against what PEFT makes of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model

from deltachain.control.agent import AdapterServer, Agent
from deltachain.errors import ControlPlaneError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.lora import adapter_assets, adapter_tensors
from deltachain.subscribe import SubscribeConfig
from tests.engines.serving import MODEL, Server, start
from tests.engines.trainer import make_batches, masters_of, one_thread, optimizer_steps, pretrain

pytestmark = pytest.mark.engine

PROMPTS = ([5, 6, 7, 8], [40, 3, 9], [17] * 6)
LENGTH = 24
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "3", "--dtype", "float32")


@dataclass
class Said:
    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)

    def agrees(self, other: "Said") -> bool:
        return self.tokens == other.tokens and all(
            torch.allclose(mine, theirs, atol=1e-4)
            for mine, theirs in zip(self.logprobs, other.logprobs, strict=True)
        )


def peft_says(model: Any) -> Said:
    said = Said()
    model.eval()
    for prompt in PROMPTS:
        with one_thread(), torch.no_grad():
            tokens = torch.tensor([prompt])
            for _ in range(LENGTH):
                logits = model(input_ids=tokens, use_cache=False).logits[:, -1]
                tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
            spread = model(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
        made = tokens[0, len(prompt) :]
        said.tokens.append(made.tolist())
        said.logprobs.append(spread[len(prompt) - 1 :].gather(1, made[:, None])[:, 0])
    model.train()
    return said


def vllm_says(server: Server, model: str) -> Said:
    said = Said()
    for prompt in PROMPTS:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": LENGTH,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        said.tokens.append(choice["token_ids"])
        said.logprobs.append(torch.tensor(choice["logprobs"]["token_logprobs"]))
    return said


def names(server: Server) -> set[str]:
    return {model["id"] for model in server.client.get("/v1/models").json()["data"]}


class Adapted:
    def __init__(self, folder: Path) -> None:
        self.base, self.url = folder / "base", (folder / "chain").as_uri()
        with one_thread():
            batches = make_batches(0)
            pretrain("qwen3", self.base, batches, 0)
            torch.manual_seed(1)
            config = LoraConfig(
                r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]
            )
            self.model: Any = get_peft_model(masters_of(self.base), config)
        self._steps = optimizer_steps(self.model, batches, 2e-2)
        self.publisher = Publisher(PublishConfig(url=self.url, when_busy="wait")).attach(
            lambda: adapter_tensors(self.model), assets=adapter_assets(self.model)
        )
        self.said = {0: peft_says(self.model)}

    def step(self) -> int:
        with one_thread(), torch.enable_grad():
            list(islice(self._steps, 3))
        version = self.publisher.publish().result(60).version
        self.said[version] = peft_says(self.model)
        return version


@pytest.fixture
def adapted(tmp_path: Path) -> Iterator[Adapted]:
    made = Adapted(tmp_path)
    yield made
    made.publisher.close()


def agent(adapted: Adapted, server: Server, folder: Path) -> Agent:
    url = str(server.client.base_url)
    reader = AdapterServer(url, name="policy", folder=folder, keep=2)
    return Agent(SubscribeConfig(url=adapted.url, poll_s=0.2), folder / "head", reader)


def test_every_version_says_what_peft_says(adapted: Adapted, tmp_path: Path) -> None:
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    server = start(
        adapted.base, tmp_path / "server", bare=True, arguments=LORA, environment=environment
    )
    with server, agent(adapted, server, tmp_path / "adapters") as led:
        led.update()
        plain = vllm_says(server, MODEL)
        assert vllm_says(server, "policy-v0").agrees(plain)  # B is zero before training
        for _ in range(3):
            version = adapted.step()
            led.update()
            assert vllm_says(server, f"policy-v{version}").agrees(adapted.said[version])
        assert vllm_says(server, "policy-v2").agrees(adapted.said[2])  # the one before is kept
        assert vllm_says(server, MODEL).agrees(plain)
        assert names(server) == {MODEL, "policy-v2", "policy-v3"}
        tokens = [adapted.said[version].tokens for version in (0, 1, 2, 3)]
        assert all(a != b for a, b in pairwise(tokens))

        _started_again(adapted, server, led)


def _started_again(adapted: Adapted, server: Server, led: Agent) -> None:
    stop = Event()
    following = Thread(target=lambda: list(led.follow(stop)), daemon=True)
    following.start()
    server.stop()
    version = adapted.step()
    with pytest.raises(httpx.TransportError):
        names(server)
    with server:
        for _ in range(300):
            if f"policy-v{version}" in names(server):
                break
            stop.wait(0.2)
        assert vllm_says(server, f"policy-v{version}").agrees(adapted.said[version])
        stop.set()
        led.subscriber.notify()
        following.join(30)
        assert not following.is_alive()


@pytest.mark.slow
def test_a_server_without_adapters_is_named_with_what_it_lacks(
    adapted: Adapted, tmp_path: Path
) -> None:
    with (
        start(adapted.base, tmp_path / "server", bare=True) as server,
        agent(adapted, server, tmp_path / "adapters") as led,
        pytest.raises(ControlPlaneError, match="load_lora_adapter") as caught,
    ):
        led.update()
    assert "--enable-lora" in caught.value.hint
