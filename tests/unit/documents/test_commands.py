"""Whatever documents tell people to type is known to the program that would run it.

Links lead somewhere, the README is short, and what documents show of the code is the code's.
"""

import functools
import importlib.util
import os
import re
import subprocess
import sysconfig
import tomllib
from collections.abc import Callable, Sequence
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
from typer.main import get_command

import deltachain
from deltachain import control, store
from deltachain.cli.app import PANELS, app
from deltachain.environment import PREFIX, VARIABLES
from docs import generated
from hatch_build import absolute_links
from spaces.dashboard.__main__ import NAME
from spaces.dashboard.__main__ import app as dashboard
from tests.test_house import contract
from tests.unit.documents.blocks import (
    DOCUMENTS,
    LANGUAGES,
    ROOT,
    Command,
    blocks,
    commands,
    languages,
)

KNOWN: Final[dict[str, Any]] = get_command(app).commands  # type: ignore[attr-defined]
DASHBOARD: Final[dict[str, Any]] = get_command(dashboard).commands  # type: ignore[attr-defined]
COMPLETION: Final = ("--install-completion", "--show-completion")

PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS: Final = set(
    re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
)

ENGINES: Final = "".join(
    path.read_text(encoding="utf-8")
    for folder in ("tests/engines", "examples/demo/online")
    for path in (ROOT / folder).rglob("*.py")
) + (ROOT / "spaces/rollout/entrypoint.sh").read_text(encoding="utf-8")
"""What starts real engines: an option that none of these gives was never tried."""

OTHERS: Final = {
    "ENGINE",  # the entrypoint of a Space
    *("AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "HOST", "PORT"),
    *("PIP_EXTRA_INDEX_URL", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_PLUGINS"),
    *("VLLM_API_KEY", "VLLM_SERVER_DEV_MODE"),
}

LINK: Final = re.compile(r"\]\((?!https?://|#)([^)\s#]+)[^)]*\)")
_SUBCOMMAND: Final = re.compile(r"^  ([a-z][\w-]*) {2,}\S", re.MULTILINE)
_OPTION: Final = re.compile(r"(?<![\w-])(--?[A-Za-z][\w-]*)")
_ROUTE: Final = re.compile(r"/deltachain/(\w+)")


def options(words: tuple[str, ...]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("-")}


def deltachain_fault(words: tuple[str, ...]) -> str:
    name, *rest = words[1:]
    if name in COMPLETION:
        return ""
    if name not in KNOWN:
        return f"no command {name}"
    return call_fault(name, KNOWN[name].params, rest)


def call_fault(name: str, params: Sequence[Any], rest: Sequence[str]) -> str:
    taken = {option for param in params for option in param.opts} | {"--help", "-h"}
    needed = [p for p in params if p.param_type_name == "argument" and p.required]
    if unknown := options(tuple(rest)) - taken:
        return f"{name} has no {unknown}"
    valued = {o for p in params if not getattr(p, "is_flag", False) for o in p.opts}
    free = [
        word
        for before, word in zip(["", *rest], rest, strict=False)
        if not word.startswith("-") and before not in valued - {""}
    ]
    return "" if len(free) >= len(needed) else f"{name} needs {len(needed)} arguments"


def make_fault(words: tuple[str, ...]) -> str:
    named = {word for word in words[1:] if "=" not in word}
    return f"no targets {named - TARGETS}" if named - TARGETS else ""


def pip_fault(words: tuple[str, ...]) -> str:
    extras = set(",".join(re.findall(r"\[([\w,]+)\]", " ".join(words))).split(",")) - {""}
    unknown = extras - PROJECT["optional-dependencies"].keys()
    return f"no extras {unknown}" if unknown else ""


def engine_fault(words: tuple[str, ...]) -> str:
    never = {o for o in options(words) if not re.search(rf'["\s]{o}["=\s]', ENGINES)}
    return f"never tried: {never}" if never else ""


def python_fault(words: tuple[str, ...]) -> str:
    if words[1] == "-c":  # tests/unit/documents/test_programs.py runs these
        return ""
    if words[1] == "-m" and words[2] == "sglang.launch_server":
        return engine_fault(words[2:])
    if words[1] == "-m" and words[2] == NAME:
        return call_fault(NAME, DASHBOARD[NAME].params, words[3:])
    if words[1] == "-m":
        found = importlib.util.find_spec(words[2])
        return "" if found else f"no module {words[2]}"
    return "" if list(ROOT.glob(f"spaces/*/{words[1]}")) else f"no file {words[1]}"


def curl_fault(words: tuple[str, ...]) -> str:
    """Routes that are not in the source of those that we have."""
    source = (ROOT / "deltachain/control/routes.py").read_text(encoding="utf-8")
    missing = {r for r in _ROUTE.findall(" ".join(words)) if f'"/{r}"' not in source}
    return f"no routes {missing}" if missing else ""


def script_fault(words: tuple[str, ...]) -> str:
    return "" if (ROOT / words[0]).is_file() else f"no file {words[0]}"


@functools.cache
def hf_help(*path: str) -> str:
    program = Path(sysconfig.get_path("scripts")) / "hf"
    return subprocess.run(
        [program, *path, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"},
    ).stdout


def hf_fault(words: tuple[str, ...]) -> str:
    """What the client's own help does not name."""
    path: tuple[str, ...] = ()
    rest = words[1:]
    while re.match(r"Usage: .*COMMAND\]? \[ARGS\]", hf_help(*path)):
        known = _SUBCOMMAND.findall(hf_help(*path).partition("\nExamples")[0])
        if not rest or rest[0] not in known:
            return f"hf {' '.join(path)} has no {rest[:1]}"
        path, rest = (*path, rest[0]), rest[1:]
    known = _OPTION.findall(hf_help(*path).partition("\nExamples")[0])
    unknown = options(rest) - set(known)
    return f"hf {' '.join(path)} has no {unknown}" if unknown else ""


def recipe_fault(words: tuple[str, ...]) -> str:
    compose = ROOT / "examples" / "deploy" / "compose"
    profiles = re.findall(r"profiles: \[(\w+)\]", (compose / "compose.yaml").read_text("utf-8"))
    wanted = {after for before, after in pairwise(words) if before == "--profile"}
    if missing := wanted - set(profiles):
        return f"no profiles {missing}"
    paths = [word for word in words[1:] if word.startswith("examples/") or word.endswith(".sh")]
    gone = {word for word in paths if not ((ROOT / word).exists() or (compose / word).exists())}
    return f"no files {gone}" if gone else ""


FAULTS: Final[dict[str, Callable[[tuple[str, ...]], str]]] = {
    ".venv/bin/pre-commit": lambda words: "" if words[1] == "install" else "unknown",
    "bash": recipe_fault,
    "cd": recipe_fault,
    "curl": curl_fault,
    "deltachain": deltachain_fault,
    "docker": recipe_fault,
    "hf": hf_fault,
    "kubectl": recipe_fault,
    "make": make_fault,
    "pip": pip_fault,
    "python": python_fault,
    "rm": lambda _: "",
    "sky": recipe_fault,
    "spaces/rollout/entrypoint.sh": script_fault,
    "vllm": engine_fault,
}


def fault(command: Command) -> str:
    names = {name for name in command.variables if name.startswith(PREFIX)}
    if unknown := {n for n in names if n.removeprefix(PREFIX) not in VARIABLES}:
        return f"no variables {unknown}"
    if strange := command.variables.keys() - names - OTHERS:
        return f"variables of nobody: {strange}"
    if not command.words:
        return ""
    check = FAULTS.get(command.words[0])
    return check(command.words) if check else f"nobody checks {command.words[0]}"


FOUND: Final = list(commands())


@pytest.mark.full
@pytest.mark.parametrize("command", FOUND, ids=str)
def test_a_command_is_known_to_its_program(command: Command) -> None:
    assert fault(command) == ""


def test_commands_are_found() -> None:
    assert len(FOUND) > 100
    assert {c.words[0] for c in FOUND if c.words} == FAULTS.keys()


@pytest.mark.parametrize("command", FOUND, ids=str)
def test_no_secret_is_an_argument(command: Command) -> None:
    assert not options(command.words) & {
        "--api-key",
        "--admin-api-key",
        "--token",
        "--key",
        "--secrets",
    }


def test_blocks_say_what_they_are() -> None:
    assert languages() == LANGUAGES


def test_entry_points_in_documents_name_what_is_there() -> None:
    names = {file.stem: file for file in (ROOT / "tests" / "unit").rglob("*.py")}
    found = 0
    for block in blocks("toml"):
        for entries in tomllib.loads(block.text)["project"]["entry-points"].values():
            for target in entries.values():
                module, _, name = target.partition(":")
                source = names[module].read_text(encoding="utf-8")
                assert re.search(rf"^(def {name}\(|{name}\b.* = )", source, re.MULTILINE), target
                found += 1
    assert found


@pytest.mark.parametrize("page", DOCUMENTS, ids=str)
def test_no_line_of_text_is_a_heading_by_mistake(page: Path) -> None:
    text = re.sub(
        r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    assert not re.findall(r"^#+[^#\s].*", text, re.MULTILINE)


def test_every_command_takes_json() -> None:
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    assert "Every command takes `--json`" in page
    commands = [command for panel in PANELS.values() for command in panel]
    assert all("as_json" in signature(command).parameters for command in commands)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    links = LINK.findall(document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_readme_is_short_and_has_one_picture() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    assert len(re.findall(r"!\[", text)) == 1


@pytest.mark.parametrize("document", list(generated.documents()), ids=str)
def test_what_is_made_from_the_code_is_as_the_code(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert generated.renewed(text) == text, "make fix"


def test_blocks_are_made_of_layers_errors_commands_and_metrics() -> None:
    assert {path.name for path in generated.documents()} == {
        "ARCHITECTURE.md",
        "commands.md",
        "operations.md",
        "troubleshooting.md",
    }
    assert "`StoreWentBackError`" in generated.exits()
    assert "### fleet" in generated.commands()
    rows = contract("layers point down")["layers"]
    shown = re.findall(r"^(\w+)(?:  |$)", generated.layers(), re.MULTILINE)
    modules = [name.strip() for row in rows for name in re.split("[|:]", row)]
    assert shown == [m.removeprefix("deltachain.") for m in modules]


def test_a_block_that_differs_is_made_again() -> None:
    text = "a\n\n<!-- generated: exits -->\nold\n<!-- end -->\nb\n"
    assert (
        generated.renewed(text)
        == f"a\n\n<!-- generated: exits -->\n\n{generated.exits()}\n\n<!-- end -->\nb\n"
    )


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
