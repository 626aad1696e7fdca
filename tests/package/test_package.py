"""Contents, metadata and behaviour of the packages that ``make package`` builds."""

import email
import importlib.metadata
import os
import re
import subprocess
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
UPLOT: Final = "spaces/dashboard/page/vendor/uplot/LICENSE"
PACKAGES: Final = {"deltachain", "deltachain_vllm", "deltachain_sglang"}

pytestmark = pytest.mark.package


def built(pattern: str) -> Path:
    (path,) = (ROOT / "dist").glob(pattern)
    return path


@pytest.fixture(scope="module")
def wheel() -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(built("*.whl")) as opened:
        yield opened


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    roots = {name.partition("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == PACKAGES
    assert {f"{package}/py.typed" for package in ("deltachain", "deltachain_vllm")} <= set(names)
    kept = [name for name in names if ".dist-info/" not in name]
    assert {Path(name).suffix for name in kept} == {".py", ".md", ".typed"}
    sources = [*(ROOT / "deltachain").rglob("*.py")]
    assert len(sources) > 100
    assert {str(path.relative_to(ROOT)) for path in sources} <= set(names)


def test_the_sdist_has_no_cache_and_no_wheel() -> None:
    with tarfile.open(built("*.tar.gz")) as sdist:
        names = [name.partition("/")[2] for name in sdist.getnames()]
    odd = [n for n in names if re.search(r"__pycache__|\.pyc$|\.whl$|_cache/|^site/|^\.venv", n)]
    assert odd == []
    needed = {
        "pyproject.toml",
        "hatch_build.py",
        "README.md",
        "tests/conftest.py",
        "LICENSE",
        UPLOT,
    }
    assert needed <= set(names)
    linked = re.findall(r"\]\((?!https?:)([^)#\s]+)\)", (ROOT / "README.md").read_text("utf-8"))
    assert {link for link in linked if (ROOT / link).is_file()} <= set(names)


def test_every_link_of_the_description_is_absolute_and_leads_somewhere(metadata: Message) -> None:
    base = PROJECT["urls"]["Repository"]
    text = str(metadata.get_payload())
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    ours = [link for link in links if link.startswith(base)]
    assert all(link.startswith("https://") for link in links)
    assert len(ours) > 15
    for link in ours:
        path = re.fullmatch(rf"{base}/(?:blob|raw)/HEAD/([^#]+)(?:#.*)?", link)
        assert path is not None, link
        assert (ROOT / path[1]).exists(), link


def test_what_it_says_of_itself(metadata: Message) -> None:
    import deltachain  # noqa: PLC0415 - of the clone

    assert metadata["Version"] == deltachain.__version__
    extras = set(metadata.get_all("Provides-Extra") or ())
    assert extras == set(PROJECT["optional-dependencies"])
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL") or ())
    assert urls == PROJECT["urls"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    install: list[str | Path] = [folder / "bin" / "pip", "install", "-q", built("*.whl")]
    subprocess.run(install, check=True, timeout=600)
    return folder / "bin" / "deltachain"


def run(program: Path, *args: object) -> subprocess.CompletedProcess[str]:
    without = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [program, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=program.parent,
        env=without | {"COLUMNS": "100"},
        timeout=120,
        check=False,
    )


def test_a_bare_environment_shows_help_and_imports_stores(bare: Path) -> None:
    done = run(bare, "--help")
    assert done.returncode == 0, done.stderr
    assert "follow" in done.stdout
    assert "make " not in done.stdout
    python = bare.with_name("python")
    assert run(python, "-c", "import deltachain, deltachain.store").returncode == 0
    assert run(python, "-m", "deltachain", "--version").stdout.startswith("deltachain ")


@pytest.mark.parametrize(
    ("args", "extra"),
    [
        (("push", ".", "chain"), "torch"),
        (("log", "s3://bucket/run"), "s3"),
        (("log", "hf://buckets/me/bucket"), "hf"),
        (("log", "gs://bucket/run"), "gcs"),
        (("log", "az://bucket/run"), "azure"),
        (("log", "sftp://host/run"), "fsspec"),
        (("keygen", "key"), "signing"),
    ],
)
def test_a_missing_extra_is_named(bare: Path, args: tuple[str, ...], extra: str) -> None:
    done = run(bare, *args)
    assert done.returncode == 2, done.stderr
    assert f"pip install 'deltachain[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_has_one_home() -> None:
    assert "version" in PROJECT["dynamic"]
    assert importlib.metadata.version("deltachain")
