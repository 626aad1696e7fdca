"""A trainer that drives servers by vLLM's own interface for trainers, with the backend's name."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)

from deltachain.errors import ConfigError, ControlPlaneError, StoreError
from deltachain.publish import publisher
from deltachain.store import MemoryStore
from deltachain_vllm import DeltaChainTrainerInit
from examples.demo.online.processes import free_port
from tests.engines.expected import holds
from tests.engines.serving import HOST, Server, start
from tests.engines.trainer import Run
from tests.ranks.spawn import run
from tests.support.faults import FaultyStore

pytestmark = pytest.mark.engine

STEPS = 20
DTYPE = {"dtype": "BF16"}  # of the checkpoint; the trainer has fp32


@pytest.fixture
def trained(tmp_path: Path) -> Run:
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
    source = ModuleSource(nn.Linear(2, 2))
    with pytest.raises(ControlPlaneError, match=rf"{HOST}.*refused"):
        WeightTransferTrainerFactory.trainer_init(init, client=nobody, source=source)
    assert not (tmp_path / "chain" / "chain.json").exists()


class Named(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """Keeps what it is told, in place of a server."""

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        self.told = [*getattr(self, "told", ()), (path, json)]


def test_a_round_that_fails_is_raised_once_and_covered_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, model, client = FaultyStore(MemoryStore()), nn.Linear(2, 2), Named("http://nobody")
    monkeypatch.setattr(publisher, "open_store", lambda *_, **__: store)
    engine = WeightTransferTrainerFactory.trainer_init(
        DeltaChainTrainerInit("memory://policy"), client=client, source=model
    )
    nn.init.ones_(model.weight)
    store.down = True
    with pytest.raises(StoreError):
        engine.send_weights()
    store.down = False
    engine.send_weights()
    (init, update) = client.told
    assert init == ("init_weight_transfer_engine", {"init_info": {}})
    assert update[1]["update_info"]["version"] == 1
    engine.shutdown()
