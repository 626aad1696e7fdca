"""``python -m tests.size``: the size of the wheel and of the tests; fails above the budget.

Raising a budget is a change that its commit argues for.
"""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
WHEEL: Final = ("deltachain", "vllm_ext/deltachain_vllm", "sglang_ext/deltachain_sglang")
LONG: Final = 800
"""Lines above which a file is named: it may hold two thoughts."""


class Size(NamedTuple):
    """Lines of Python, number of files, and share of imports in lines of code."""

    lines: int
    files: int
    imports: float


BUDGET: Final = {
    "wheel": Size(58_540, 264, 0.09),
    "tests": Size(88_650, 405, 1.0),
}


def size(*folders: str) -> Size:
    """Measure the tracked Python files of some folders."""
    listed = subprocess.check_output(
        ["git", "ls-files", *(f"{folder}/*.py" for folder in folders)],  # noqa: S607
        cwd=ROOT,
        text=True,
    )
    files = [ROOT / name for name in listed.split() if (ROOT / name).exists()]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    for file, text in texts.items():
        if text.count("\n") > LONG:
            sys.stdout.write(f"{file.relative_to(ROOT)}: more than {LONG} lines\n")
    code, imports = map(sum, zip(*map(_lines, texts.values()), strict=True))
    return Size(sum(text.count("\n") for text in texts.values()), len(files), imports / code)


def _lines(text: str) -> tuple[int, int]:
    """Lines of code, without blank lines, comments and docstrings; and those of imports."""
    tree = ast.parse(text)
    prose: set[int] = set()
    imports = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports += (node.end_lineno or 0) - node.lineno + 1
    code = sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in prose
        for number, line in enumerate(text.splitlines(), 1)
    )
    return code, imports


def main() -> int:
    """Print all sizes beside their budgets; return 1 if one is above."""
    over = False
    for name, found in (("wheel", size(*WHEEL)), ("tests", size("tests"))):
        most = BUDGET[name]
        over |= any(one > limit for one, limit in zip(found, most, strict=True))
        sys.stdout.write(
            f"{name}: {found.lines:,} of {most.lines:,} lines in {found.files} of {most.files} "
            f"files, imports {found.imports:.1%} of code\n"
        )
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
