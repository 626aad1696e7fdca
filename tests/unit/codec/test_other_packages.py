"""An encoding comes with an installed package: one file, and one line of metadata."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deltachain import PublishConfig
from deltachain.chain.chain import Chain
from deltachain.codec.encodings import ENCODINGS, GROUP, EncodingRegistry
from deltachain.codec.encodings.sparse import StepEncoding
from deltachain.errors import ConfigError, UnsupportedFormatError
from deltachain.store import open_store
from tests.support.made_up import write_package
from tests.support.values import present
from tests.unit.cli.support import invoke
from tests.unit.codec.acme_zigzag import ZIGZAG

HERE = Path(__file__).parent

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install packages for this process, until the test ends."""

    def add(source: str, module: str, name: str = "acme.x", value: str = "") -> None:
        folder = tmp_path / module
        entry = f"[{GROUP}]\n{name} = {value or f'{module}:ENCODING'}\n"
        write_package(folder, module, source=source, entries=entry)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, module, raising=False)

    return add


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of chains and delta files that a process with the package wrote, and proved."""
    folder = tmp_path_factory.mktemp("written")
    source = (HERE / "acme_zigzag.py").read_text()
    entry = f"[{GROUP}]\nacme.zigzag = acme_zigzag:ZIGZAG\n"
    write_package(folder / "site", "acme_zigzag", source=source, entries=entry)
    path = os.pathsep.join([str(folder / "site"), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, HERE / "use_zigzag.py", folder],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(folder / "site")
    return folder


@pytest.mark.full
def test_an_installed_encoding_is_published_followed_and_verified(written: Path) -> None:
    chain = Chain.open(open_store(written / "chain"))
    head = present(chain.head())
    assert (head.version, head.manifest.edge.encodings) == (3, ("acme.zigzag",))


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "command"),
    [
        (4, ("pull", "pushed", "--out", "again")),
        (5, ("verify", "pushed")),
        (5, ("inspect", "delta")),
    ],
)
def test_commands_without_the_package_name_the_encoding(
    written: Path, code: int, command: tuple[str, ...]
) -> None:
    names = [word if word.startswith("-") else str(written / word) for word in command[1:]]
    done = invoke(command[0], *names)
    assert done.code == code
    assert "unknown encoding 'acme.zigzag'" in done.stderr
    assert "install the package" in done.stderr
    assert ("anchor" in done.stderr) == (command[0] == "pull")
    assert not (written / "again").exists()


@pytest.mark.parametrize("name", ["acme.zigzag", "dense", "plain", "zip", ""])
def test_only_a_known_encoding_of_changes_is_chosen(name: str) -> None:
    expected = "encoding='.*': expected one of .'step', 'overwrite', 'raw'"
    with pytest.raises(ConfigError, match=expected):
        PublishConfig(url="memory://unused", encoding=name)


# The registry

SOURCE = """
from dataclasses import dataclass
from deltachain.codec.encodings.sparse import StepEncoding

@dataclass(frozen=True, slots=True)
class Other(StepEncoding):
    name = "acme.x"

ENCODING = Other()
"""

NAMES = [
    *("os", "os:system", "acme", "x", "acme.", "acme.x ", " acme.x", "acme.x\n", "ACME.X"),
    *("acme_x", "acme_x:ENCODING", "acme.x:ENCODING", "../acme.x", "", "\0", "a" * 100_000),
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_in_bytes_imports_nothing_but_its_own_entry_point(
    install: Install, name: str
) -> None:
    install(SOURCE, "acme_x")
    registry = EncodingRegistry([StepEncoding()])
    before = set(sys.modules)
    assert name not in registry
    with pytest.raises(UnsupportedFormatError, match="unknown encoding") as caught:
        registry.get(name, key="part")
    assert len(str(caught.value)) < 300
    assert set(sys.modules) - before <= {"importlib.metadata", *sys.stdlib_module_names}
    assert "acme_x" not in sys.modules


def test_an_installed_encoding_is_imported_when_it_is_asked_for(install: Install) -> None:
    install(SOURCE, "acme_x")
    registry = EncodingRegistry([StepEncoding()])
    assert set(registry) == {"step", "acme.x"}
    assert "acme_x" not in sys.modules
    assert "acme.x" in registry
    assert registry.get("acme.x").name == registry.chosen("acme.x").name == "acme.x"
    assert "acme_x" in sys.modules
    sys.modules.pop("acme_x")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise ImportError('no such library')", "no such library"),
        ("1 / 0", "ZeroDivisionError"),
        ("ENCODING = 7", "not an Encoding"),
        (
            "from deltachain.codec.encodings.sparse import StepEncoding as ENCODING",
            "not an Encoding",
        ),
        (SOURCE.replace("acme.x", "acme.y"), "not an Encoding of that name"),
        ("", "no attribute"),
    ],
)
def test_a_package_that_does_not_load_is_left_out_and_named(
    install: Install, source: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(source, "acme_x")
    registry = EncodingRegistry([StepEncoding()])
    with caplog.at_level(logging.WARNING):
        assert [("acme.x" in registry) for _ in range(3)] == [False] * 3
    assert len(caplog.records) == 1
    with pytest.raises(UnsupportedFormatError, match=why) as caught:
        registry.get("acme.x")
    assert "acme_x 1.0" in str(caught.value)
    assert set(registry) == {"step"}
    with pytest.raises(ConfigError, match=why):
        registry.chosen("acme.x")


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    install(SOURCE, "acme_x")
    install(SOURCE, "acme_z")
    registry = EncodingRegistry([])
    with pytest.raises(UnsupportedFormatError, match="several packages") as caught:
        registry.get("acme.x")
    assert "acme_x 1.0" in str(caught.value)
    assert "acme_z 1.0" in str(caught.value)
    assert {"acme_x", "acme_z"}.isdisjoint(sys.modules)


def test_a_package_takes_no_name_of_the_format(install: Install) -> None:
    install(SOURCE.replace("acme.x", "step"), "acme_x", name="step")
    install(SOURCE.replace("acme.x", "later"), "acme_y", name="later")
    registry = EncodingRegistry([StepEncoding()])
    assert registry.get("step") == StepEncoding()
    with pytest.raises(UnsupportedFormatError, match="dots between"):
        registry.get("later")
    sys.modules.pop("acme_y")


def test_an_encoding_is_registered_for_this_process() -> None:
    registry = EncodingRegistry([StepEncoding()])
    registry.register(ZIGZAG)
    registry.register(ZIGZAG)
    assert registry.get("acme.zigzag") is ZIGZAG
    with pytest.raises(ConfigError, match="dots between"):
        registry.register(StepEncoding())
    assert "acme.zigzag" not in ENCODINGS
