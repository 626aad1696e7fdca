"""Links lead somewhere, the README is short, and what documents show of the code is the code's."""

import os
import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path
from typing import Final

import pytest

import deltachain
from deltachain import control, store
from docs.generated import commands, documents, exits, layers, renewed
from hatch_build import absolute_links
from tests.test_house import contract
from tests.unit.documents.blocks import DOCUMENTS, ROOT

LINK: Final = re.compile(r"\]\((?!https?://|#)([^)\s#]+)[^)]*\)")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_somewhere(document: Path) -> None:
    links = LINK.findall(document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_readme_is_short_and_has_one_picture() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    assert len(re.findall(r"!\[", text)) == 1


@pytest.mark.parametrize("document", list(documents()), ids=named)
def test_what_is_made_from_the_code_is_as_the_code(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert renewed(text) == text, "make fix"


def test_blocks_are_made_of_layers_errors_commands_and_metrics() -> None:
    assert {path.name for path in documents()} == {
        "ARCHITECTURE.md",
        "commands.md",
        "operations.md",
        "troubleshooting.md",
    }
    assert "`StoreWentBackError`" in exits()
    assert "### fleet" in commands()
    rows = contract("layers point down")["layers"]
    shown = re.findall(r"^(\w+)(?:  |$)", layers(), re.MULTILINE)
    modules = [name.strip() for row in rows for name in re.split("[|:]", row)]
    assert shown == [m.removeprefix("deltachain.") for m in modules]


def test_a_block_that_differs_is_made_again() -> None:
    text = "a\n\n<!-- generated: exits -->\nold\n<!-- end -->\nb\n"
    assert renewed(text) == f"a\n\n<!-- generated: exits -->\n\n{exits()}\n\n<!-- end -->\nb\n"


def test_the_reference_has_every_public_name() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    found = {
        name
        for page in pages
        for name in re.findall(r"^::: deltachain\.(\S+)$", page.read_text("utf-8"), re.MULTILINE)
    }
    # Errors have a page of their module.
    assert found >= set(deltachain.__all__) - {"__version__", "DeltaChainError"} | {"errors"}
    assert found >= {f"control.{n}" for n in control.__all__} - {"control.Fleet"}
    stores = set(store.__all__) - {"Buffer", "open_store"}
    assert found >= {f"store.{name}" for name in stores}


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named_there = set(re.findall(r": ([\w/-]+\.md)$", navigation, re.MULTILINE))
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert pages <= named_there
    elsewhere = named_there - pages
    hooks = (ROOT / "docs" / "hooks.py").read_text(encoding="utf-8")
    assert elsewhere == set(re.findall(r'": "([\w-]+\.md)"', hooks))


def test_the_site_asks_nobody_for_a_font() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings
    assert "http" not in settings.replace("http.server", "")


def test_links_of_a_package_are_made_from_one_place() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = LINK.findall(text)
    assert len(relative) > 15
    there = "https://a.example/b"
    absolute = absolute_links(text, there)
    made = rf"\]\({re.escape(there)}/(?:blob|raw)/HEAD/([^)#]+)"
    assert re.findall(made, absolute) == relative
    assert LINK.findall(absolute) == []


def test_a_shell_completes_commands() -> None:
    program = Path(sysconfig.get_path("scripts")) / "deltachain"
    typed = {"COMP_WORDS": "deltachain fl", "COMP_CWORD": "1"}
    asked = os.environ | typed | {"_DELTACHAIN_COMPLETE": "complete_bash"}
    done = subprocess.run([program], capture_output=True, text=True, check=False, env=asked)
    assert done.stdout.split() == ["fleet"]
