"""Trainer process: TRL's asynchronous GRPO, with the chain as weight transfer."""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from datasets import Dataset
from transformers import (
    AutoTokenizer,
    PrinterCallback,
    TrainerState,
)
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

from deltachain.integrations.trl import DeltaChainWeightTransfer
from examples.demo.callbacks import RewardCallback
from examples.demo.compare_bits import dump_bits
from examples.demo.online.cpu import run_on_cpu
from examples.demo.online.engine import EngineKind
from examples.demo.online.rollouts import GameTable, GameWorker
from examples.demo.process_setup import quiet_libraries, spare_one_core

LEARNING_RATE: Final = 1e-4
GROUP: Final = 8
SAMPLES: Final = 64
"""Approximate number of games of an optimizer step, by the token budget."""

TOKENS: Final = 2048
SAVE_STEPS: Final = 5
MAX_STALENESS: Final = 4
TRAINER_STATE: Final = "trainer_state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """Options of the trainer process."""

    checkpoint: str
    url: str
    engine: str
    kind: EngineKind
    environment: str
    folder: str
    steps: int
    seed: int
    token: str

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> "TrainerOptions":
        return cls(**json.loads(file.read_text(encoding="utf-8")))


def diary_of(folder: Path) -> Path:
    return folder / "samples.jsonl"


def bits_of(folder: Path) -> Path:
    return folder / "last.npz"


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint; a killed trainer may have left a partial one."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name[11:])):
        with suppress(OSError, ValueError):
            TrainerState.load_from_json(str(path / TRAINER_STATE))  # the last file written
            return str(path)
    return None


def train(orders: TrainerOptions) -> None:
    run_on_cpu()
    folder = Path(orders.folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(orders.checkpoint, local_files_only=True)
    transfer = DeltaChainWeightTransfer(
        orders.url,
        engines=[orders.engine],
        token=orders.token,
        deadline=30.0,
        on_error="warn",
    )
    table = GameTable(
        engine=orders.engine,
        kind=orders.kind,
        environment=orders.environment,
        group=GROUP,
        at_once=SAMPLES,
        ahead=SAMPLES,
        seed=orders.seed,
        diary=diary_of(folder),
    )
    worker = GameWorker(table, tokenizer, lambda: transfer.version)
    with quiet_libraries(), spare_one_core():
        trainer: Any = AsyncGRPOTrainer(
            model=orders.checkpoint,
            args=_arguments(orders),
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            reward_funcs=_unused,
            processing_class=tokenizer,
            rollout_worker=worker,
            weight_transfer=transfer,
            callbacks=[RewardCallback(partial(_say_step, transfer))],
        )
        trainer.remove_callback(PrinterCallback)
        transfer.attach(trainer)
        trainer.train(resume_from_checkpoint=last_checkpoint(folder))
        dump_bits(trainer.model, bits_of(folder))
    say(event="done", version=transfer.version)


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _unused(completions: list[str], **_: object) -> list[float]:
    return [0.0] * len(completions)


def _arguments(orders: TrainerOptions) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(
        output_dir=orders.folder,
        max_steps=orders.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        token_budget=TOKENS,
        max_staleness=MAX_STALENESS,
        num_generations=GROUP,
        gradient_checkpointing=False,
        dtype="float32",
        seed=orders.seed,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def _say_step(transfer: DeltaChainWeightTransfer, step: int, logs: Mapping[str, float]) -> None:
    announced = transfer.announced
    say(
        event="step",
        step=step,
        reward=logs["reward"],
        version=transfer.version,
        sync_s=logs.get("perf/weight_sync_s"),
        late=list(announced.stragglers) if announced else [],
    )


if __name__ == "__main__":
    train(TrainerOptions.read(Path(sys.argv[1])))
