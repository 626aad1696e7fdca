"""TRL's asynchronous GRPO trainer, really training, with the chain as its weight transfer."""

import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from deltachain.control.announce import Wait
from deltachain.control.replica_client import ReplicaClient
from deltachain.errors import ConfigError, ControlPlaneError, StoreUnavailableError
from deltachain.format.keys import manifest_key
from deltachain.integrations.trl import DeltaChainWeightTransfer, skip_gather
from deltachain.publish import publisher as publisher_module
from deltachain.store import MemoryStore
from examples.demo.model import make_model, make_tokenizer, save_checkpoint
from tests.support.faults import Action, Fault, FaultyStore
from tests.support.models import recompute, same

STEPS = 3
TRL: Final = Path(__file__).resolve().parents[3] / ".venv-trl"


def run_on_cpu() -> None:
    """Replace the attention that needs a card; the samples are noise, so any will do."""
    try:
        from examples.demo.online import cpu  # noqa: PLC0415 - TRL before 1.16 has no packing

        cpu.run_on_cpu()
    except ImportError:
        module: Any = async_grpo_trainer
        load = module.create_model_from_path
        module.create_model_from_path = lambda name, **given: load(
            name, **{**given, "attn_implementation": "sdpa"}
        )
        module.get_peak_flops_per_device = lambda *_: None


class Samples:
    """A rollout worker whose samples are noise: enough to change weights."""

    def __init__(self, transfer: DeltaChainWeightTransfer) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        self.synced: list[tuple[int, int]] = []
        self.bits: list[dict[str, Any]] = []
        self.model: Any = None
        self._transfer = transfer

    def start(self) -> None:
        dice = np.random.default_rng(0)
        for number in range(4 * STEPS):
            mask = np.ones(16, np.int64)
            mask[:4] = 0
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=dice.integers(5, 500, 16).astype(np.int64),
                    completion_mask=mask,
                    old_log_probs=np.full(16, -6.0, np.float32),
                    advantage=float((-1) ** number),
                    model_version=1,
                    group_id=number,
                    metrics={},
                    enqueued_at=time.time(),
                )
            )

    def stop(self) -> None:
        pass

    def update_model_version(self, model_version: int) -> None:
        self.synced.append((model_version, self._transfer.version))
        weights = {n: p.detach().to(torch.bfloat16) for n, p in self.model.named_parameters()}
        self.bits.append(
            {n: t.view(torch.int16).numpy().view("u2").ravel() for n, t in weights.items()}
        )

    def check_health(self, stale_after_s: float) -> None:
        del stale_after_s


class Told(ReplicaClient):
    """A replica that takes a version when it is told, or when it feels like it."""

    def __init__(self, name: str, *, late_s: float = 0.0) -> None:
        super().__init__(f"http://{name}")
        self.versions: list[int] = []
        self._late_s = late_s

    def update(self, version: int | None = None, *, manifest: str = "") -> Any:
        assert version is not None
        time.sleep(self._late_s)
        if self._late_s > 5:
            raise ControlPlaneError("it hangs")
        self.versions.append(version)
        return type("Status", (), {"version": version, "manifest": manifest, "doubt": ""})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_checkpoint(make_model(0), make_tokenizer(), folder)
    return folder


@dataclass(frozen=True)
class Trained:
    """A trainer that came to its end, with the seconds that each sync held it up."""

    trainer: Any
    transfer: DeltaChainWeightTransfer
    held_s: list[float]

    @property
    def slowest_s(self) -> float:
        """Of all but the first, which begins the chain."""
        return max(self.held_s[1:])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    made = FaultyStore(MemoryStore())
    monkeypatch.setattr(publisher_module, "open_store", lambda *_, **__: made)
    monkeypatch.setattr(made, "close", lambda: None)
    return made


@pytest.fixture
def train(base: Path, tmp_path: Path) -> Callable[..., Trained]:
    """Trains with these engines and settings of the transfer."""

    def run(*engines: Told, attach: bool = True, **settings: Any) -> Trained:
        run_on_cpu()
        transfer = DeltaChainWeightTransfer(
            "memory://policy", engines=list(engines), dtype="BF16", **settings
        )
        held_s = timed(transfer)
        trainer: Any = AsyncGRPOTrainer(
            model=str(base),
            args=AsyncGRPOConfig(
                output_dir=str(tmp_path),
                max_steps=STEPS,
                learning_rate=1e-4,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=1,
                token_budget=40,
                gradient_checkpointing=False,
                dtype="float32",
                use_cpu=True,
                bf16=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            processing_class=AutoTokenizer.from_pretrained(base),
            rollout_worker=Samples(transfer),
            weight_transfer=transfer,
        )
        if attach:
            transfer.attach(trainer)
            skip_gather(trainer)  # as on several ranks
        trainer.rollout_worker.model = trainer.model
        trainer.train()
        return Trained(trainer, transfer, held_s)

    return run


def timed(transfer: DeltaChainWeightTransfer) -> list[float]:
    held_s: list[float] = []
    send = transfer.send_weights

    def timing(iterator: Any) -> None:
        start = time.monotonic()
        send(iterator)
        held_s.append(time.monotonic() - start)

    transfer.send_weights = timing  # type: ignore[method-assign]
    return held_s


def holds_the_last_step(engine: Told, store: FaultyStore) -> bool:
    versions = recompute(store)
    newest = max(versions)
    step = versions[newest].committed.manifest.step
    return (engine.versions[-1], step) == (newest, STEPS)


Train = Callable[..., Trained]


@pytest.mark.parametrize(
    "attach", [True, pytest.param(False, marks=pytest.mark.full)], ids=["own", "given"]
)
def test_every_sync_is_a_version_that_all_engines_hold(
    train: Train, store: FaultyStore, attach: bool
) -> None:
    engines = [Told("a"), Told("b", late_s=0.2)]
    trainer = train(*engines, attach=attach).trainer
    assert any(trainer._streaming_iter()) is not attach
    assert trainer.rollout_worker.synced == [(n + 1, n) for n in range(STEPS + 1)]
    assert all(engine.versions == list(range(STEPS + 1)) for engine in engines)
    versions = recompute(store)
    for version, bits in enumerate(trainer.rollout_worker.bits):
        assert same(versions[version].state, bits), version
    if attach:
        logs = trainer.state.log_history
        assert [line["deltachain/version"] for line in logs if "loss" in line] == [1, 2, 3]
        assert all(line["deltachain/stragglers"] == 0 for line in logs if "loss" in line)


@pytest.mark.full
def test_training_goes_on_without_an_engine_that_hangs(
    train: Train, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [Told("a"), Told("b", late_s=6)]
    done = train(*engines, deadline=0.5)
    assert done.slowest_s < 5.0
    assert list(dict.fromkeys(engines[0].versions)) == list(range(STEPS + 1))  # all once more
    assert "http://b" in caplog.text
    assert done.transfer.announced is not None
    assert done.transfer.announced.stragglers == ("http://b",)
    assert recompute(store).keys() == set(range(STEPS + 1))


@pytest.mark.full
def test_a_store_that_fails_once_costs_a_version_and_no_more(
    train: Train, store: FaultyStore
) -> None:
    store.add(Fault("fail", "deltas/", nth=1, times=1))
    engine = Told("a")
    trainer = train(engine, on_error="warn").trainer
    assert engine.versions == [0, 1, 2]
    assert trainer.rollout_worker.synced == [(1, 0), (2, 0), (3, 1), (4, 2)]


@pytest.mark.full
def test_a_store_that_can_not_say_what_became_of_a_version_holds_nobody_up(
    train: Train, store: FaultyStore
) -> None:
    unread = Fault("fail-read", manifest_key(1), times=2)
    store.add(Fault(lambda: store.add(unread), manifest_key(1)))  # from its put on
    store.add(Fault("lose-reply", manifest_key(1)))
    engine = Told("a")
    assert train(engine, on_error="warn").slowest_s < 30
    assert holds_the_last_step(engine, store)
    assert engine.versions[-1] > 0


@pytest.mark.full
def test_a_store_that_fails_ends_training_where_that_is_wanted(
    train: Train, store: FaultyStore
) -> None:
    store.add(Fault("fail", "deltas/", times=None))
    with pytest.raises(StoreUnavailableError):
        train()


@pytest.mark.full
def test_nobody_is_waited_for(train: Train, store: FaultyStore) -> None:
    engine = Told("a", late_s=0.5)
    done = train(engine, wait="none", when_busy="wait")
    assert recompute(store).keys() == set(range(STEPS + 1))
    assert engine.versions[-1] == STEPS  # at the end at the latest
    assert len(done.transfer.receipts) == STEPS


@pytest.mark.full
@pytest.mark.parametrize("wait", ["all", "none"])
@pytest.mark.parametrize("kind", ["fail", "lose-reply"])
def test_a_last_sync_that_failed_is_made_up_for_at_the_end(
    train: Train, store: FaultyStore, *, wait: Wait, kind: Action
) -> None:
    store.add(Fault(kind, "deltas/", nth=STEPS, times=1))
    engine = Told("a")
    train(engine, wait=wait, on_error="warn", when_busy="wait")
    assert holds_the_last_step(engine, store)


@pytest.mark.full
def test_a_slow_upload_holds_nobody_past_the_deadline(train: Train, store: FaultyStore) -> None:
    store.add(Fault("slow", "deltas/", times=1, seconds=6.0))
    engine = Told("a")
    assert train(engine, deadline=0.5).slowest_s < 4.0
    assert holds_the_last_step(engine, store)


@pytest.mark.parametrize("release", ["1.13.0", "1.14.2", "1.15.0"])
@pytest.mark.full
@pytest.mark.venv("trl")
def test_earlier_releases_do_the_same(release: str) -> None:
    case = f"{__file__}::{test_every_sync_is_a_version_that_all_engines_hold.__name__}"
    code = "import pytest, sys, trl; print(trl.__version__); sys.exit(pytest.main(sys.argv[1:]))"
    paths = os.pathsep.join([str(TRL / release), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, "-p", "no:cacheprovider", case],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(release)


def test_a_trainer_that_gathers_in_another_way_is_refused() -> None:
    ranks = SimpleNamespace(accelerator=SimpleNamespace(num_processes=2))
    with pytest.raises(ConfigError, match="_streaming_iter") as caught:
        DeltaChainWeightTransfer("memory://policy").attach(ranks)
    assert f"TRL {trl.__version__}" in str(caught.value)
    assert "1.13 to 1.16" in caught.value.hint


def test_a_trainer_that_syncs_too_early_is_refused() -> None:
    transfer = DeltaChainWeightTransfer("memory://policy")
    alone, handler = SimpleNamespace(num_processes=1), SimpleNamespace(callbacks=[])
    transfer.attach(SimpleNamespace(accelerator=alone, callback_handler=handler))
    with pytest.raises(ConfigError, match="synced before its other callbacks"):
        transfer.send_weights(iter(()))
