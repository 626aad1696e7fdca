"""Settings that the ranks of a trainer must share, and those that they need not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from deltachain.chain.chain import Chain
from deltachain.publish.quantise.settings import Quantization
from deltachain.store import open_store
from deltachain.verify import verify
from tests.ranks.spawn import run

pytestmark = pytest.mark.dist

SMALL = Quantization("int8-row", ignore=("small",))

DIFFERENT: dict[str, tuple[Any, Any, list[str]]] = {
    "recipe": ("int8-row", "fp8-row", ["'int8-row'", "'fp8-row'"]),
    "grid": ("fp8-row", "fp8-tensor", ["'fp8-row'", "'fp8-tensor'"]),
    "scales": ("fp8-block", "fp8-block-ue8m0", ["'fp8-block'", "'fp8-block-ue8m0'"]),
    "ignore": (SMALL, "int8-row", ["ignore small", "ignore lm_head"]),
    "first": ("int8-row", None, ["'int8-row'", "None on rank 1"]),
    "second": (None, "int8-row", ["None on rank 0", "'int8-row'"]),
}


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_quantise_differently_are_refused(tmp_path: Path, case: str) -> None:
    first, second, said = DIFFERENT[case]
    chain = tmp_path / "chain"
    settings = [{"quantization": first}, {"quantization": second}]
    arguments = (chain.as_uri(), settings, ["quantization is", *said])
    run("tests.ranks.settings_trials:refuses", 2, *arguments)
    assert not files(chain)


def test_a_restart_with_another_recipe_on_one_rank_spoils_no_chain(tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    run("tests.ranks.settings_trials:publishes", 2, chain.as_uri(), "int8-row")
    before = files(chain)
    settings = [{"quantization": "int8-row"}, {"quantization": "fp8-row"}]
    run("tests.ranks.settings_trials:refuses", 2, chain.as_uri(), settings, ["on rank 1"])
    assert files(chain) == before
    run("tests.ranks.settings_trials:publishes", 2, chain.as_uri(), "int8-row")
    proofs = list(verify(Chain.open(open_store(chain))))
    assert len(proofs) > 3


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("encoding", "step", "max"),
        ("encoding", "raw", "step"),
        ("dtype", "BF16", None),
        ("when_busy", "cover", "wait"),
        ("on_error", "raise", "warn"),
        ("deadline_s", 60.0, 50.0),
    ],
)
def test_other_settings_that_differ_are_refused(
    tmp_path: Path, name: str, first: object, second: object
) -> None:
    chain = tmp_path / "chain"
    said = [f"{name} is {first!r} on rank 0, {second!r} on rank 1"]
    settings = [{name: first}, {name: second}]
    run("tests.ranks.settings_trials:refuses", 2, chain.as_uri(), settings, said)
    assert not files(chain)


def test_urls_that_differ_are_refused(tmp_path: Path) -> None:
    urls = [(tmp_path / str(rank)).as_uri() for rank in range(2)]
    settings, said = [{"url": url} for url in urls], ["url is", *urls]
    run("tests.ranks.settings_trials:refuses", 2, "", settings, said)
    assert not files(tmp_path)


@pytest.mark.parametrize("owner", [0, 1])
def test_a_base_on_one_rank_is_refused(tmp_path: Path, owner: int) -> None:
    settings: list[dict[str, Any]] = [{}, {}]
    settings[owner] = {"base": tmp_path / "base"}
    said = [f"given on rank {owner}"]
    run("tests.ranks.settings_trials:refuses", 2, (tmp_path / "chain").as_uri(), settings, said)
    assert not files(tmp_path)


def test_different_steps_are_refused(tmp_path: Path) -> None:
    run("tests.ranks.settings_trials:refuses_steps", 2, (tmp_path / "chain").as_uri())
    assert not files(tmp_path)


@pytest.mark.parametrize("known", [False, True])
def test_a_store_that_only_one_rank_sees_is_refused(tmp_path: Path, *, known: bool) -> None:
    """The URLs are equal, and the folder is not shared: there is no chain, or another one."""
    if known:
        settings: list[dict[str, Any]] = [{}, {}]
        for rank in range(2):
            url = (tmp_path / str(rank)).as_uri()
            run("tests.ranks.settings_trials:publishes_with", 2, url, settings)
    before = files(tmp_path / "1")
    message = "has chain .* on rank 1" if known else "chain.json"
    run("tests.ranks.settings_trials:opens_another_store", 2, str(tmp_path), message)
    assert files(tmp_path / "1") == before
    if known:
        list(verify(Chain.open(open_store(tmp_path / "0"))))


def test_a_copy_of_the_store_is_refused(tmp_path: Path) -> None:
    """The chain has the same id in both, and rank 1 does not see what rank 0 commits."""
    url = (tmp_path / "0").as_uri()
    run("tests.ranks.settings_trials:publishes_with", 2, url, [{}, {}])
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    before = files(tmp_path / "1")
    run("tests.ranks.settings_trials:opens_another_store", 2, str(tmp_path), "version|manifest")
    assert files(tmp_path / "1") == before
    list(verify(Chain.open(open_store(tmp_path / "0"))))


def test_settings_of_a_process_or_of_rank_0_may_differ(tmp_path: Path) -> None:
    chain, assets = tmp_path / "chain", tmp_path / "assets"
    assets.mkdir()
    settings: list[dict[str, Any]] = [
        {"metadata": {"run": "a"}, "anchor_every": 2},
        {
            "assets": assets,
            "trust_remote_code": True,
            "snapshot": "host",
            "anchor_factor": 9.0,
            "maintain": True,
            "anchor_memory": 0.0,
            "continue_reverted": True,
            "take_over": True,
            "part_nbytes": 1000,
            "metadata": {"run": "b"},
        },
    ]
    run("tests.ranks.settings_trials:publishes_with", 2, chain.as_uri(), settings)
    opened = Chain.open(open_store(chain))
    list(verify(opened))
    assert {opened.read(v).manifest.metadata["run"] for v in range(4)} == {"a"}
