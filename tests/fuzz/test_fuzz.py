"""The fuzzer runs for a while against every reader."""

from pathlib import Path

import pytest

from tests.engines.serving import run_program
from tests.fuzz.mutate import MUTATORS, TARGETS, seeds

SECONDS = 20


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_fuzzing_finds_nothing(target: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    arguments = ["--target", target, "--seconds", str(SECONDS), "--corpus", str(corpus)]
    done = run_program("tests.fuzz.run", *arguments)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-5000:]
    runs = int(log.split("Done ")[1].split(" runs")[0])
    assert runs > 500
    assert len(list(corpus.iterdir())) > len(list(seeds(target)))


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_every_seed_is_read_or_refused(target: str) -> None:
    for _, data in seeds(target):
        TARGETS[target](data)


def test_every_reader_has_a_mutator() -> None:
    assert TARGETS.keys() == MUTATORS.keys()
