from __future__ import annotations

import json
import pickle
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltachain import errors
from deltachain.cli import console
from deltachain.errors import DeltaChainError, DigestMismatchError, UnsupportedModelError


def family(kind: type[DeltaChainError]) -> Iterator[type[DeltaChainError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from family(child)


def made(kind: type[DeltaChainError]) -> DeltaChainError:
    """An error of a kind, with every attribute its own."""
    if kind is DigestMismatchError:
        error: DeltaChainError = DigestMismatchError("m", expected="a", actual="b", hint="h")
    else:
        error = kind("m", hint="h")
    for number, name in enumerate(vars(error)):
        setattr(error, name, f"{name} {number}")
    return error


@pytest.mark.parametrize("kind", list(family(DeltaChainError)))
def test_errors_survive_the_way_to_another_process(kind: type[DeltaChainError]) -> None:
    error = made(kind)
    found = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(found) is kind
    assert (found.args, vars(found)) == (error.args, vars(error))
    assert str(found) == str(error)


def test_a_family_has_every_class_of_the_module() -> None:
    classes = {c for c in vars(errors).values() if isinstance(c, type)}
    assert set(family(DeltaChainError)) == {c for c in classes if issubclass(c, DeltaChainError)}
    assert len(classes) > 20


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = [line for line in (errors.__doc__ or "").splitlines() if "── " in line]
    depths = {line.split("── ")[1].split()[0]: (line.index("── ") - 1) // 4 for line in drawn}
    names = {kind.__name__ for kind in family(DeltaChainError)} - {"DeltaChainError"}
    assert depths.keys() == names
    for kind in family(DeltaChainError):
        if kind is not DeltaChainError:
            parents = [base for base in kind.__mro__ if base.__name__ in names]
            assert depths[kind.__name__] == len(parents), kind


def anchor_of(heading: str) -> str:
    """The name of a heading in links to it."""
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", list(family(DeltaChainError)))
def test_the_page_of_an_error_is_there_and_names_the_error(kind: type[DeltaChainError]) -> None:
    page, heading = kind.page.removeprefix(f"{errors.DOCS}/").split("#")
    text = (ROOT / "docs" / page).read_text("utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    title = next(one for one in headings if anchor_of(one) == heading)
    assert kind.__name__ in text.split(f"# {title}\n")[1].split("\n#")[0]
    error = made(kind)
    error.hint = "h"
    assert str(error).endswith(f"\n  hint: h\n  page: {kind.page}")


def test_pages_lie_where_the_package_says(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["urls"]["Documentation"] == errors.DOCS
    error = UnsupportedModelError("m", hint="h")
    console.say_error(error)
    assert capsys.readouterr().err == f"error  m\nhint   h\npage   {error.page}\n"
    console.say_error(error, as_json=True)
    assert json.loads(capsys.readouterr().err)["error"]["page"] == error.page
