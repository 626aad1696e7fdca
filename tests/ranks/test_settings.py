"""Settings that the ranks of a trainer must share, and those that they need not."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from deltachain.chain.chain import Chain
from deltachain.chain.trust import SigningKey, Trust
from deltachain.publish.quantise.settings import RECIPES, Quantization
from deltachain.store import open_store
from deltachain.verify import verify
from tests.ranks.settings_trials import HUB_VERSIONS, SYNCS
from tests.ranks.spawn import run
from tests.support.hub.server import HubServer

REFUSALS = [
    ("hooked", "which FSDP1 gathers to say", "FSDP2"),
    ("inside", "part of an FSDP1 module outside", "outermost"),
    ("meeting", "hold 6 elements, and their checkpoint 3", "one copy of tied weights"),
    ("parallel", "sharded or not contiguous before FSDP1", "FSDP2"),
    ("partial", "partial sum", "redistribute"),
    ("unequal", "differs on ranks 0 and 1", "replicas must be equal"),
    ("shape", "on one rank", "DTensors"),
    ("scattered", "rows that are not neighbours", "deltachain push"),
    ("misfit", "this rank holds", "between steps"),
    ("frozen", "is frozen on rank 1, trained on rank 0", "the same weights"),
    ("expert", "is an expert that other ranks have under the same name", "ep_size=1"),
    ("nothing", "there are no weights", "no rank has any part"),
]


@pytest.mark.parametrize(("kind", "message", "hint"), REFUSALS)
def test_what_can_not_be_published_is_refused_on_every_rank(
    tmp_path: Path, kind: str, message: str, hint: str
) -> None:
    ranks = 4 if kind == "parallel" else 2
    run("tests.ranks.trials:refused", ranks, kind, message, hint, str(tmp_path / "chain"))


def test_copies_that_ranks_change_apart_are_refused(tmp_path: Path) -> None:
    run("tests.ranks.trials:drifts", 2, (tmp_path / "chain").as_uri())


def test_only_rank_0_needs_the_signing_key(tmp_path: Path) -> None:
    key, url = SigningKey.generate(), (tmp_path / "chain").as_uri()
    file = tmp_path / "key"
    file.write_bytes(key.pem())
    for first in range(2):
        run("tests.ranks.settings_trials:publishes_signed", 2, str(file), url, first)
    trust = Trust.of_reader(str(key.public))
    proofs = list(verify(Chain.open(open_store(url), trust)))
    assert [proof.signed_by for proof in proofs] == [(key.public.key_id,)] * len(proofs)
    assert len(proofs) > 3


def test_a_reverted_head_is_refused_on_every_rank(tmp_path: Path) -> None:
    url = (tmp_path / "chain").as_uri()
    run("tests.ranks.trials:goes_back", 2, url)
    assert len(list(verify(Chain.open(open_store(url))))) == 9


def test_ranks_take_no_more_requests_than_one_publisher(hub: HubServer, bucket: str) -> None:
    url = f"hf://buckets/{bucket}/run"
    run("tests.ranks.settings_trials:publishes_to_hub", 3, url, hub.url, hub.token)
    chain = Chain.open(open_store(url, {"endpoint": hub.url, "token": hub.token}))
    proofs = list(verify(chain))
    assert len(proofs) == HUB_VERSIONS + 1
    assert len(chain.read(HUB_VERSIONS).manifest.edge.parts) == 3


@pytest.mark.parametrize("wait", ["all", pytest.param("none", marks=pytest.mark.slow)])
def test_every_sync_of_sharded_weights_is_a_version(tmp_path: Path, wait: str) -> None:
    url = (tmp_path / "chain").as_uri()
    run("tests.ranks.settings_trials:syncs", 2, url, str(tmp_path), wait)
    proofs = list(verify(Chain.open(open_store(url))))
    assert [proof.version for proof in proofs] == list(range(SYNCS + 1))


@pytest.mark.parametrize("trial", ["trainer_with_copies", "accelerate_with_shards"])
def test_what_trainers_of_transformers_and_accelerate_hold_is_published(
    tmp_path: Path, trial: str
) -> None:
    url = (tmp_path / "chain").as_uri()
    run(f"tests.ranks.transformers_trials:{trial}", 2, url, str(tmp_path))


@pytest.mark.parametrize(
    "kind", ["qwen3_moe FSDP1", "hrm_text", "inkling2_text", "inkling2_text FSDP1", "llava"]
)
def test_what_is_converted_when_it_is_saved_loads_and_computes_the_same(
    tmp_path: Path, kind: str
) -> None:
    url = (tmp_path / "chain").as_uri()
    run("tests.ranks.transformers_trials:converted", 2, kind, url, str(tmp_path))


STEPS = 3


def states(folder: Path, model: str, recipe: str, ranks: int, dim: int = 0) -> list[str]:
    url = (folder / f"{model}-{recipe}-{ranks}-{dim}").as_uri()
    run("tests.ranks.settings_trials:publishes_quantised", ranks, model, recipe, dim, url, STEPS)
    chain = Chain.open(open_store(url))
    return [chain.identity.table, *(chain.read(v).manifest.state for v in range(STEPS + 1))]


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_ranks_publish_what_one_process_does(tmp_path: Path, recipe: str) -> None:
    one = states(tmp_path, "layers", recipe, 1)
    assert len(set(one)) == STEPS + 2
    assert states(tmp_path, "layers", recipe, 2) == one
    assert states(tmp_path, "layers", recipe, 3) == one
    assert states(tmp_path, "layers", recipe, 3, 1) == one, "by columns"


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-tensor", "int8-row", "nvfp4a16"])
def test_ranks_share_experts(tmp_path: Path, recipe: str) -> None:
    one = states(tmp_path, "mixture", recipe, 1)
    for dim in range(3):
        assert states(tmp_path, "mixture", recipe, 2, dim) == one, dim


@pytest.mark.parametrize("recipe", ["fp8-block", "nvfp4a16"])
@pytest.mark.parametrize("spoilt", [0, 1])
def test_weights_that_are_not_finite_stop_every_rank(
    tmp_path: Path, spoilt: int, recipe: str
) -> None:
    run(
        "tests.ranks.settings_trials:refuses_quantised",
        2,
        recipe,
        (tmp_path / "chain").as_uri(),
        spoilt,
    )


def test_a_cut_between_codes_of_one_byte_is_refused_by_every_rank(tmp_path: Path) -> None:
    run("tests.ranks.settings_trials:splits_bytes", 3, (tmp_path / "chain").as_uri())
    assert not list(tmp_path.rglob("chain.json"))


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
