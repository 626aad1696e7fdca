"""The examples in the docstrings of the public names run, and print what they show."""

import doctest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deltachain

NAMES = [name for name in deltachain.__all__ if name != "__version__"]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Change the first row of a weight of shape (2, 3), and no other element."""
    optimizer.zero_grad()
    model(torch.ones(1, 3, dtype=torch.bfloat16))[0, 0].backward()
    optimizer.step()


@pytest.fixture
def names(tmp_path: Path) -> Mapping[str, Any]:
    """What examples may use: a chain of two versions, an empty URL, a model and its optimizer."""
    model = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.copy_(torch.arange(1, 7).view(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    url = str(tmp_path / "chain")
    with deltachain.Publisher(url).attach(model) as publisher:
        train_step(model, optimizer)
        publisher.publish(step=1).result()
    return {
        "deltachain": deltachain,
        "model": model,
        "new_url": str(tmp_path / "new"),
        "optimizer": optimizer,
        "train_step": train_step,
        "url": url,
        "weights": {"weight": torch.zeros(2, 3, dtype=torch.bfloat16)},
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_public_name_runs(name: str, names: Mapping[str, Any]) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(
        getattr(deltachain, name), name, module=False, globs=dict(names)
    )
    assert any(doctest.SKIP not in example.options for example in test.examples)
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert (failed, tried > 0) == (0, True)
