"""GRPO on a game of OpenEnv: the policy plays by tool calls, and each optimizer step is a version.

Needs ``pip install 'deltachain[trl,s3]' openenv-core``, and the game, here or as a Space::

    pip install -r spaces/environment/requirements.txt
    python spaces/environment/server.py --host 127.0.0.1 --port 7860
    GAME=http://127.0.0.1:7860 DELTACHAIN_URL=s3://policies/run-1 python examples/10_openenv.py

``MODEL`` is a name on the Hub or a folder, of a chat model that calls tools. Without
``DELTACHAIN_URL`` the chain is in a temporary folder. Prints a receipt of each version, and the
number of games.
"""

import os
import tempfile
from typing import Any

import torch
from datasets import Dataset
from openenv import GenericEnvClient
from trl import GRPOConfig, GRPOTrainer

import deltachain

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
URL = os.environ.get("DELTACHAIN_URL") or tempfile.mkdtemp()
GAME = os.environ.get("GAME", "http://127.0.0.1:7860")
STEPS = int(os.environ.get("STEPS", "3"))

TASK = "Guess a word of five letters by the tool. g: right, y: elsewhere in the word, .: not in it."

games = 0


class WordGame:
    """A game; TRL makes the policy's tools of its public methods."""

    def __init__(self) -> None:
        self._client = GenericEnvClient(base_url=GAME).sync()
        self._reward = 0.0

    def reset(self, seed: int, **_: Any) -> str:
        """Begin a game; games of one seed have the same word."""
        global games  # noqa: PLW0603 - one line of a report
        games += 1
        self._reward = 0.0
        return str(self._client.reset(seed=seed).observation["message"])

    def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: The guess, five letters.

        Returns:
            Feedback on each letter.
        """
        result = self._client.step({"word": word})
        self._reward = result.reward or 0.0
        return str(result.observation["message"])

    def get_reward(self) -> float:
        """Return 1 for a word that was found at once, less the later it was."""
        return self._reward


def short(completions: list[Any], **_: object) -> list[float]:
    """Return a little more for less text."""
    return [-len(str(completion)) / 10_000 for completion in completions]


def main() -> None:
    prompt = [{"role": "user", "content": TASK}]
    trainer = GRPOTrainer(
        model=MODEL,
        reward_funcs=short,
        environment_factory=WordGame,
        train_dataset=Dataset.from_list([{"prompt": prompt, "seed": seed} for seed in range(64)]),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            model_init_kwargs={"dtype": "float32"},
            max_steps=STEPS,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=64,
            max_tool_calling_iterations=4,
            learning_rate=1e-6,
            chat_template_kwargs={"enable_thinking": False},
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    callback = deltachain.attach(trainer, url=URL, when_busy="wait")
    trainer.train()
    for receipt in callback.receipts:
        print(receipt)  # version 1 delta nnz 31,202 density 0.566% ...
    print(f"{games} games")


if __name__ == "__main__":
    main()
