"""A trainer that drives servers by vLLM's own interface for trainers, with the backend's name."""

from pathlib import Path

import pytest
import torch
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)

from deltachain.errors import ConfigError, ControlPlaneError
from deltachain_vllm import DeltaChainTrainerInit
from examples.demo.online.processes import free_port
from tests.engines.expected import holds
from tests.engines.families import with_tokenizer
from tests.engines.serving import HOST, Server, start
from tests.engines.trainer import make_batches, masters_of, one_thread, optimizer_steps, pretrain
from tests.ranks.spawn import run

pytestmark = pytest.mark.engine

STEPS = 20
RATE = 1e-2
DTYPE = {"dtype": "BF16"}  # of the checkpoint; the trainer has fp32


class Run:
    """A model in training, and the checkpoints that it saves itself."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.base = folder, folder / "base"
        batches = make_batches(0)
        pretrain("qwen3", self.base, batches, 0)
        self.model = masters_of(self.base)
        self._steps = optimizer_steps(self.model, batches, RATE)

    def step(self) -> None:
        with one_thread(), torch.enable_grad():
            next(self._steps)

    def saved(self) -> Path:
        folder = self.folder / "saved"
        state = {name: tensor.bfloat16() for name, tensor in self.model.state_dict().items()}
        self.model.save_pretrained(folder, state_dict=state)
        with_tokenizer(folder)
        return folder


@pytest.fixture
def trained(tmp_path: Path) -> Run:
    with one_thread():
        return Run(tmp_path)


def client_of(server: Server) -> HTTPVLLMWeightSyncClient:
    return HTTPVLLMWeightSyncClient(f"http://{HOST}:{server.port}", timeout=60)


def test_servers_have_each_of_twenty_steps_once_it_was_sent(trained: Run, tmp_path: Path) -> None:
    """The server starts before there is a chain."""
    url = (tmp_path / "chain").as_uri()
    with start(trained.base, tmp_path / "server", url, plain=True, dev=True) as server:
        engine = WeightTransferTrainerFactory.trainer_init(
            DeltaChainTrainerInit(url, DTYPE),
            client=[client_of(server)],
            source=ModuleSource(trained.model),
        )
        for step in range(1, STEPS + 1):
            trained.step()
            engine.send_weights()
            assert server.named() == str(step)
            assert holds(server, trained.saved(), 1), step
        assert server.generate([5, 6, 7], 4).spans == ((0, 4, str(STEPS)),)
        with pytest.raises(ControlPlaneError, match="ChainError"):
            engine._call("update_weights", {"version": STEPS, "manifest": "0" * 64})
        engine.shutdown()


@pytest.mark.parametrize("kind", ["shards", "gathered", "halves"])
def test_ranks_publish_what_they_hold_and_name_it_once(kind: str, tmp_path: Path) -> None:
    run("tests.engines.vllm.trainer_ranks:follow", 2, kind, str(tmp_path))


def test_a_trainer_needs_weights_and_a_server_that_answers(tmp_path: Path) -> None:
    init = DeltaChainTrainerInit((tmp_path / "chain").as_uri())
    nobody = HTTPVLLMWeightSyncClient(f"http://{HOST}:{free_port()}")
    with pytest.raises(ConfigError, match="no weights"):
        WeightTransferTrainerFactory.trainer_init(init, client=nobody)
    source = ModuleSource(torch.nn.Linear(2, 2))
    with pytest.raises(ControlPlaneError, match=rf"{HOST}.*refused"):
        WeightTransferTrainerFactory.trainer_init(init, client=nobody, source=source)
    assert not (tmp_path / "chain" / "chain.json").exists()
