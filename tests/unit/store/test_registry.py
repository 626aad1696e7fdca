import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from deltachain.errors import ConfigError
from deltachain.store import MemoryStore, Store, open_store, register, registry
from tests.support.made_up import write_package

TOY = Path(__file__).with_name("sqlite_store.py")

CONTRACT = """
from collections.abc import Callable
from pathlib import Path

import pytest

from deltachain.store import Store, open_store
from deltachain.testing.store import StoreContract


class TestOutside(StoreContract):
    race_rounds = 5

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"sqlite://{tmp_path}/chain.db")

    @pytest.fixture
    def reopen(self, store: Store) -> Callable[[], Store]:
        return lambda: open_store(store.url)
"""


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of packages that has one with a store for ``sqlite://``."""
    entry = "[deltachain.stores]\nsqlite = sqlite_store:open_sqlite\n"
    source = TOY.read_text(encoding="utf-8")
    write_package(tmp_path / "site", "sqlite_store", source=source, entries=entry)
    return tmp_path / "site"


def run(site: Path, *arguments: str) -> str:
    """Run Python beside the packages in a folder; what it prints."""
    path = os.pathsep.join(filter(None, [str(site), *sys.path]))
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        cwd=site,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def open_toy(_url: str, _options: Mapping[str, Any], /, *, writer: bool) -> Store:
    return MemoryStore("writer" if writer else "reader")


# A package of others: one file, and one line in its entry points


@pytest.mark.full
def test_a_store_of_another_package_keeps_the_contract(outside: Path) -> None:
    (outside / "test_contract.py").write_text(CONTRACT)
    asked = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "test_contract.py")
    assert " passed" in run(outside, *asked)


@pytest.mark.full
def test_a_chain_is_pushed_pulled_and_verified_there(outside: Path, tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/chain.db"
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        weights = np.arange(1000, dtype=np.float32)
        weights[:number] = -1
        save_file({"a": weights}, folder / "model.safetensors")
        run(outside, "-m", "deltachain", "push", str(folder), url)
    pulled = tmp_path / "pulled"
    run(outside, "-m", "deltachain", "pull", url, "--out", str(pulled))
    (found,) = pulled.glob("*.safetensors")
    assert found.read_bytes()[-4000:] == (folder / "model.safetensors").read_bytes()[-4000:]
    proven = json.loads(run(outside, "-m", "deltachain", "verify", url, "--json"))
    assert (proven["url"], proven["last"]) == (url, 1)


def test_packages_are_not_searched_for_schemes_that_are_known(outside: Path) -> None:
    code = (
        "import sys; from deltachain.store import open_store\n"
        "open_store('memory://a'); open_store('.'); print('importlib.metadata' in sys.modules)\n"
        "try: open_store('sqlite:///')\nexcept Exception as exc: print(exc)\n"
        "print('sqlite_store' in sys.modules)"
    )
    first, *_, last = run(outside, "-c", code).splitlines()
    assert (first, last) == ("False", "True")


def test_an_unknown_scheme_is_answered_with_those_of_packages(outside: Path) -> None:
    code = (
        "import sys; sys.modules['fsspec'] = None; from deltachain.store import open_store\n"
        "try: open_store('nonsense://user:secret@host/x')\nexcept Exception as exc: print(exc)"
    )
    said = run(outside, "-c", code)
    known = ("file", "hf", "memory", "s3", "sqlite", "deltachain[fsspec]")
    assert all(name in said for name in known)
    assert "secret" not in said


def test_a_package_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = "[deltachain.stores]\nbroken = absent_module:open_broken\n"
    write_package(tmp_path, "broken", entries=entry)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"absent_module:open_broken.*No module named"):
        open_store("broken://x")


def test_two_packages_with_one_scheme_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        entry = f"[deltachain.stores]\nboth = {name}:open_it\n"
        write_package(tmp_path, name, entries=entry)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"one:open_it, two:open_it"):
        open_store("both://x")


# A program without a package


def test_a_registered_opener_opens_its_scheme() -> None:
    register("toy", open_toy)
    assert open_store("toy://x").url == "memory://reader"
    assert open_store("TOY://x", writer=True).url == "memory://writer"
    register("toy", open_toy)


def test_a_scheme_has_one_store() -> None:
    register("toy", open_toy)
    with pytest.raises(ConfigError, match="toy:// already has a store"):
        register("toy", lambda _url, _options, /, *, writer: MemoryStore(str(writer)))
    with pytest.raises(ConfigError, match="s3:// already has a store"):
        register("s3", open_toy)


@pytest.mark.parametrize("scheme", ["", "a", "Toy", "1a", "a b", "toy://", "ä-b"])
def test_what_cannot_be_a_scheme_is_refused(scheme: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the scheme"):
        register(scheme, open_toy)
