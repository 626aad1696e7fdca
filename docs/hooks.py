"""What makes one site of the documents of the repository, each of which has one home.

Documents outside ``docs/`` become pages as they are. Links are those of the repository, and are
turned into links of the site: to a page where there is one, else into the repository itself.
"""

import logging
import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import griffe
from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parents[1]

PAGES: Final = {
    "README.md": "index.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "vulnerabilities.md",
    "deltachain/ARCHITECTURE.md": "architecture.md",
    "deltachain/FORMAT.md": "format.md",
    "sglang_ext/README.md": "sglang.md",
    "vllm_ext/README.md": "vllm.md",
}
"""Documents outside ``docs/``, and the pages that they are."""

_NAME: Final = re.compile(r"^::: deltachain\.(\S+)$", re.MULTILINE)
_FENCED: Final = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\]\((?![a-z]+:|#)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_ROLE: Final = re.compile(r":(?:class|meth|func|mod|attr):(?=<code)")

_log: Final = logging.getLogger("mkdocs.hooks.documents")


def on_files(files: Files, config: Any) -> Files:  # noqa: ANN401 - MkDocs's own
    """Add the documents that lie elsewhere."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:  # noqa: ANN401
    """Turn links of the repository into links of the site."""
    here = page.file.src_uri
    source = next((s for s, p in PAGES.items() if p == here), f"docs/{here}")
    # Text and fenced blocks in turn; a block without a language is of a shell.
    return "".join(
        part.replace("```\n", "```bash\n", 1) if number % 2 else _linked(part, source, here)
        for number, part in enumerate(_FENCED.split(markdown))
    )


def on_page_content(html: str, **_: object) -> str:
    """Remove roles of Sphinx, which Markdown shows as they are."""
    return _ROLE.sub("", html)


def on_env(env: object, **_: object) -> object:
    """Warn of public names without a docstring; in strict mode that ends the build."""
    for path in undocumented():
        _log.warning("%s has no docstring", path)
    return env


def undocumented() -> Iterator[str]:
    """The public names of the reference, and their members, that say nothing of themselves."""
    package = griffe.load("deltachain", search_paths=[ROOT], resolve_aliases=True)
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for path in _NAME.findall(page.read_text(encoding="utf-8")):
            found = package[path]
            yield from _silent(found.final_target if found.is_alias else found)


def _silent(found: Any) -> Iterator[str]:  # noqa: ANN401 - griffe's objects and aliases
    if not found.has_docstring:
        yield found.path
        return
    for name, member in found.members.items() if found.is_class else ():
        # What only __init__ sets is no part of the API unless the class's docstring names it.
        hidden = name.startswith("_") or member.is_alias or "override" in _decorators(member)
        hidden = hidden or member.labels == {"instance-attribute"}
        # A field may be described in the docstring of its class.
        described = re.search(rf"^\s+{name}: ", found.docstring.value, re.MULTILINE)
        if not (hidden or described or any(_says(of, name) for of in (found, *found.mro()))):
            yield member.path


def _says(found: Any, name: str) -> bool:  # noqa: ANN401 - griffe's
    return name in found.members and found.members[name].has_docstring


def _decorators(member: Any) -> str:  # noqa: ANN401
    return " ".join(str(d.value) for d in getattr(member, "decorators", ()))


def _linked(text: str, source: str, here: str) -> str:
    repository = _repository()

    def link(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found["path"]))
        anchor = found["anchor"] or ""
        page = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
        if page and (page in PAGES.values() or (ROOT / "docs" / page).is_file()):
            return f"]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"
        if not (ROOT / path).exists():
            _log.warning("%s links to %s, which is not there", source, path)
        return f"]({repository}/blob/HEAD/{path}{anchor})"

    return _LINK.sub(link, text)


def _repository() -> str:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    url: str = settings["project"]["urls"]["Repository"]
    return url
