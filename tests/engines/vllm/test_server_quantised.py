"""Weights of eight bits: quantised by the trainer, or by the engine while it loads them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engines.serving import Server, answers, start
from tests.engines.test_server_load import Trial, checked
from tests.engines.trainer import Trainer
from tests.engines.vllm.fresh import multiplies_codes_exactly

pytestmark = pytest.mark.engine

RECIPES = ("int8-row", "fp8-row")

ONLINE = "fp8_per_channel"
"""A scheme of vLLM that quantises bf16 weights while they are loaded, and runs on a CPU."""


def equals_a_fresh_load(
    trainer: Trainer, server: Server, folder: Path, arguments: Sequence[str] = ()
) -> bool:
    found = answers(server)
    server.stop()
    with start(trainer.pulled(trainer.head), folder, arguments=arguments, requests=16) as fresh:
        return answers(fresh) == found


def of_codes(folder: Path, recipe: str, versions: int) -> None:
    if recipe == "int8-row" and not multiplies_codes_exactly():
        pytest.skip("int8 products saturate on a CPU without VNNI: no judge expects its tokens")
    with (
        Trainer(folder, family="llama", quantization=recipe) as trainer,
        start(trainer.base, folder / "server", trainer.url, requests=16) as server,
    ):
        assert set(server.status()["classes"]) == {"reloaded", "in_place"}
        trial = Trial(trainer, server, push=True)
        seen = checked(trial, versions, finish={"length"})
        assert any(len(answer.spans) > 1 for _, answer in seen.generated)
        assert equals_a_fresh_load(trainer, server, folder / "fresh")


@pytest.mark.parametrize("recipe", RECIPES)
def test_versions_of_codes_arrive_under_load(recipe: str, tmp_path: Path) -> None:
    of_codes(tmp_path, recipe, 3)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_thirty_versions_of_codes_arrive_under_load(recipe: str, tmp_path: Path) -> None:
    of_codes(tmp_path, recipe, 30)


def test_weights_that_the_engine_quantises_are_those_of_a_fresh_load(tmp_path: Path) -> None:
    arguments = ["--quantization", ONLINE]
    with (
        Trainer(tmp_path, family="llama", steps=2) as trainer,
        start(
            trainer.base, tmp_path / "server", trainer.url, arguments=arguments, requests=16
        ) as server,
    ):
        assert set(server.status()["classes"]) == {"reloaded", "in_place"}
        said = [answers(server)]
        for _ in range(3):
            server.update(trainer.step())
            said.append(answers(server))
            assert said[-1] != said[-2]
        assert equals_a_fresh_load(trainer, server, tmp_path / "fresh", arguments)
