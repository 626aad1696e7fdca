"""Settings that the ranks of a trainer must share, and those that they need not."""

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from typing_extensions import override

import deltachain
from deltachain.chain.chain import Chain
from deltachain.chain.trust import SigningKey, Trust
from deltachain.control.fleet import Wait
from deltachain.control.trl_transfer import DeltaChainWeightTransfer
from deltachain.errors import ChainError, ConfigError, DeltaChainError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.quantise.settings import RECIPES, Quantization
from deltachain.publish.quantise.tensors import CutMessage
from deltachain.publish.ranks.collectives import Collective
from deltachain.publish.revert import revert
from deltachain.store import open_store
from deltachain.verify import verify
from tests.ranks.models import MODELS, Block, Layers, Training, set_up, shard_, step_
from tests.ranks.spawn import on_ranks, run
from tests.support.faults import FaultyStore
from tests.support.hub.server import HubServer

pytestmark = pytest.mark.dist

DEADLINE_S = 60.0


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


# Weights that cannot be published


def _linear(weight: float = 1.0, *, trained: bool = True, rows: int = 2) -> nn.Module:
    module = nn.Linear(3, rows)
    nn.init.constant_(module.weight, weight)
    nn.init.ones_(module.bias)
    module.weight.requires_grad_(trained)
    return module


def _fsdp1(*, original: bool) -> nn.Module:
    return FullyShardedDataParallel(
        Block(), use_orig_params=original, device_id=torch.device("cpu")
    )


def _placed(local: int, placement: Placement, **whole: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    module = nn.Module()
    module.w = nn.Parameter(DTensor.from_local(torch.ones(local), mesh, [placement], **whole))
    return module


EIGHT: dict[str, Any] = {"shape": torch.Size([8]), "stride": (1,)}

REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "flat": (partial(_fsdp1, original=False), "FSDP1", "FSDP2"),
    "fsdp1": (partial(_fsdp1, original=True), "FSDP1", "deltachain push"),
    "partial": (lambda: _placed(3, Partial()), "partial sum", "redistribute"),
    "unequal": (
        lambda: _linear(distributed.get_rank()),
        "differs on ranks 0 and 1",
        "replicas must be equal",
    ),
    "shape": (lambda: _linear(rows=2 + distributed.get_rank()), "on one rank", "DTensors"),
    "scattered": (
        lambda: _placed(4, _StridedShard(0, split_factor=2), **EIGHT),
        "rows that are not neighbours",
        "deltachain push",
    ),
    "misfit": (lambda: _placed(3, Shard(0), **EIGHT), "this rank holds", "between steps"),
    "frozen": (
        lambda: _linear(trained=distributed.get_rank() == 0),
        "is frozen on rank 1, trained on rank 0",
        "the same weights",
    ),
    "nothing": (nn.Identity, "there are no weights", "no rank has any part"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_can_not_be_published_is_refused_on_every_rank(tmp_path: Path, kind: str) -> None:
    run(refuses_weights, 2, kind, str(tmp_path / "chain"))
    assert not files(tmp_path)


def refuses_weights(rank: int, kind: str, url: str) -> None:
    del rank
    make, message, hint = REFUSED[kind]
    with pytest.raises(ConfigError, match=message) as caught:
        Publisher(PublishConfig(url=url, deadline_s=30)).attach(make())
    assert hint in caught.value.hint


# One rank's part in what all do


OLD_KEY = SigningKey.of(b"\2" * 32)


def test_only_rank_0_needs_the_signing_key(tmp_path: Path) -> None:
    key, url = SigningKey.generate(), (tmp_path / "chain").as_uri()
    file = tmp_path / "key"
    file.write_bytes(key.pem())
    for first in range(2):
        run(publishes_signed, 2, str(file), url, first)
    trust = Trust.of_reader(str(key.public))
    proofs = list(verify(Chain.open(open_store(url), trust)))
    assert [proof.signed_by for proof in proofs] == [(key.public.key_id,)] * len(proofs)
    assert len(proofs) > 3


def publishes_signed(rank: int, key: str, url: str, first: int) -> None:
    os.environ["DELTACHAIN_TRUSTED_KEYS"] = str(OLD_KEY.public)
    training = Training(url, signing_key=None if rank else Path(key))
    for number in range(first):
        training.train(number)
    with training:
        assert training.publish(first).result(60).step == first


@on_ranks(2)
def test_a_reverted_head_is_refused_on_every_rank(rank: int, url: str, folder: str) -> None:
    del folder
    with Training(url, when_busy="wait") as training:
        for number in range(2):
            training.publish(number)
    if rank == 0:
        chain = Chain.open(open_store(url))
        done = revert(chain, chain.read(0))
        assert done.committed is not None
        assert done.committed.version == 3
    distributed.barrier()
    with pytest.raises(ChainError, match="version 3 was reverted to the state of version 0"):
        training.__enter__()
    older = Training(url)
    with older:
        assert (older.publisher.version, older.publisher.epoch) == (4, 2)
    with pytest.raises(ChainError, match="version 4 was reverted to the state of version 0"):
        training.__enter__()  # nothing was trained since
    accepting = PublishConfig(url=url, dtype="BF16", continue_reverted=True)
    with Publisher(accepting).attach(training.model) as publisher:
        assert publisher.version == 6
    with older:
        assert older.publisher.version == 8  # version 6 has no mark
    if rank == 0:
        assert len(list(verify(Chain.open(open_store(url))))) == 9


HUB_VERSIONS = 4


def test_ranks_take_no_more_requests_than_one_publisher(hub: HubServer, bucket: str) -> None:
    url = f"hf://buckets/{bucket}/run"
    options = {"endpoint": hub.url, "token": hub.token}
    run(publishes_to_hub, 3, url, options)
    chain = Chain.open(open_store(url, options))
    assert len(list(verify(chain))) == HUB_VERSIONS + 1
    assert len(chain.read(HUB_VERSIONS).manifest.edge.parts) == 3


def publishes_to_hub(rank: int, url: str, options: Mapping[str, str]) -> None:
    with Training(url, storage_options=options, anchor_every=2) as training:
        store = training.publisher._store
        attached = store.requests
        for number in range(HUB_VERSIONS):
            assert training.publish(number).result(60).step == number
    made = store.requests - attached
    assert made >= 3 * HUB_VERSIONS if rank == 0 else made <= 1  # another token of the storage


SYNCS = 3


@pytest.mark.parametrize("wait", ["all", pytest.param("none", marks=pytest.mark.slow)])
def test_every_sync_of_sharded_weights_is_a_version(tmp_path: Path, wait: str) -> None:
    url = (tmp_path / "chain").as_uri()
    run(syncs, 2, url, str(tmp_path), wait)
    proofs = list(verify(Chain.open(open_store(url))))
    assert [proof.version for proof in proofs] == list(range(SYNCS + 1))


def syncs(rank: int, url: str, folder: str, wait: Wait) -> None:
    training = Training(url)
    trainer: Any = SimpleNamespace(
        model=training.model,
        accelerator=SimpleNamespace(unwrap_model=lambda it: it),
        state=SimpleNamespace(global_step=0),
        _streaming_iter=lambda: iter(()),
        _metrics={"train": defaultdict(list)},
    )
    transfer = DeltaChainWeightTransfer(url, wait=wait, dtype="BF16", when_busy="wait")
    transfer.attach(trainer)
    for step in range(SYNCS + 1):
        if step:
            training.train(step)
            trainer.state.global_step = step
        with CommDebugMode() as communication:
            if rank == 0:
                transfer.send_weights(trainer._streaming_iter())
            else:
                for _ in trainer._streaming_iter():
                    raise AssertionError("there is nothing to gather")
        assert communication.get_total_counts() == 0
        distributed.barrier()
        if wait == "all":
            assert rank or transfer.version == step  # the others hear of it a little later
            training.check(step, folder)
    if rank == 0:  # as TRL does
        transfer.destroy()
    distributed.barrier()
    training.check(SYNCS, f"{folder}/last")


# Quantised weights


STEPS = 3


def states(folder: Path, model: str, recipe: str, ranks: int, dim: int = 0) -> list[str]:
    url = (folder / f"{model}-{recipe}-{ranks}-{dim}").as_uri()
    run(publishes_quantised, ranks, model, recipe, dim, url, STEPS)
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


def publishes_quantised(rank: int, model: str, recipe: str, dim: int, url: str, steps: int) -> None:
    del rank
    made = MODELS[model]()
    if distributed.get_world_size() > 1:
        shard_(made, dim)
    config = PublishConfig(
        url=url, quantization=recipe, dtype="BF16", when_busy="wait", deadline_s=DEADLINE_S
    )
    sent: list[int] = []
    monitored = Collective.all_gather

    def all_gather(self: Any, value: Any, kind: Any) -> Any:
        if isinstance(value, CutMessage):
            sent.append(sum(len(one.amax) for one in value.found))
        return monitored(self, value, kind)

    with pytest.MonkeyPatch.context() as patch, Publisher(config).attach(made) as publisher:
        patch.setattr(Collective, "all_gather", all_gather)
        for number in range(steps):
            step_(made, number)
            publisher.publish(step=number).result(DEADLINE_S)
    weights = sum(p.numel() for p in made.parameters())
    assert all(nbytes < weights / 20 for nbytes in sent), sent  # amax travels, not weights


@pytest.mark.parametrize("recipe", ["fp8-block", "nvfp4a16"])
@pytest.mark.parametrize("spoilt", [0, 1])
def test_weights_that_are_not_finite_stop_every_rank(
    tmp_path: Path, spoilt: int, recipe: str
) -> None:
    run(refuses_quantised, 2, recipe, (tmp_path / "chain").as_uri(), spoilt)


def refuses_quantised(rank: int, recipe: str, url: str, spoilt: int) -> None:
    model = Layers()
    shard_(model, 0)
    config = PublishConfig(
        url=url, quantization=recipe, dtype="BF16", when_busy="wait", deadline_s=20
    )
    with Publisher(config).attach(model) as publisher:
        sharded: Any = model.wide.weight
        local: Tensor = sharded.to_local()
        kept = local.detach().clone()
        if rank == spoilt:
            with torch.no_grad():
                local[0, 7] = float("nan")
        error: BaseException | None = None
        try:
            error = publisher.publish(step=1).exception(DEADLINE_S)
        except DeltaChainError as exc:
            error = exc
        assert error is not None
        assert "'wide.weight' has values that are not finite" in str(error), error
        assert publisher.version == 0
        with torch.no_grad():
            local.copy_(kept)
        step_(model, 1)
        try:
            publisher.publish(step=2).result(DEADLINE_S)
        except (ConfigError, DeltaChainError):  # the first failure is raised once
            publisher.publish(step=3).result(DEADLINE_S)
        assert publisher.version == 1


@on_ranks(3)
def test_a_cut_between_codes_of_one_byte_is_refused_by_every_rank(
    rank: int, url: str, folder: str
) -> None:
    del rank
    model = nn.ModuleDict({"up": nn.Linear(32, 6, bias=False)})
    shard_(model, 1)
    config = PublishConfig(url=url, quantization="nvfp4a16", dtype="BF16", deadline_s=20)
    with pytest.raises(DeltaChainError, match=r"'up\.weight': this rank holds columns") as caught:
        Publisher(config).attach(model)
    assert "stores the codes of 2 columns in one U8 number" in str(caught.value)
    assert not files(Path(folder))


# Settings


SMALL = Quantization("int8-row", ignore=("small",))

DIFFERENT: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], list[str]]] = {
    "recipe": (
        {"quantization": "int8-row"},
        {"quantization": "fp8-row"},
        ["quantization is 'int8-row'", "'fp8-row'"],
    ),
    "ignored layers": (
        {"quantization": SMALL},
        {"quantization": "int8-row"},
        ["ignore small", "ignore lm_head"],
    ),
    "quantised on rank 0": ({"quantization": "int8-row"}, {}, ["'int8-row'", "None on rank 1"]),
    "quantised on rank 1": ({}, {"quantization": "int8-row"}, ["None on rank 0", "'int8-row'"]),
    "url": ({"url": "0"}, {"url": "1"}, ["url is ", "/0 on rank 0, ", "/1 on rank 1"]),
    "base on rank 0": ({"base": "base"}, {}, ["base is given on rank 0"]),
    "base on rank 1": ({}, {"base": "base"}, ["given on rank 1"]),
    "all others": (
        {"encoding": "step", "when_busy": "cover", "on_error": "raise", "deadline_s": 60.0},
        {
            "encoding": "max",
            "dtype": None,
            "when_busy": "wait",
            "on_error": "warn",
            "deadline_s": 50.0,
        },
        [
            "encoding is 'step' on rank 0, 'max' on rank 1",
            "dtype is 'BF16' on rank 0, None on rank 1",
            "when_busy is 'cover' on rank 0, 'wait' on rank 1",
            "on_error is 'raise' on rank 0, 'warn' on rank 1",
            "deadline_s is 60.0 on rank 0, 50.0 on rank 1",
        ],
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_settings_that_differ_are_refused_before_anything_is_written(
    tmp_path: Path, case: str
) -> None:
    *settings, said = DIFFERENT[case]
    run(refuses, 2, str(tmp_path), settings, said)
    assert not files(tmp_path)


def refuses(
    rank: int, folder: str, settings: Sequence[Mapping[str, Any]], said: Sequence[str]
) -> None:
    os.chdir(folder)
    training = Training(**{"url": "chain", **settings[rank]})
    with pytest.raises(ConfigError, match="the ranks have different settings") as caught:
        training.__enter__()
    for text in said:
        assert text in str(caught.value), str(caught.value)
    assert "every rank" in caught.value.hint


@on_ranks(2)
def test_different_steps_are_refused(rank: int, url: str, folder: str) -> None:
    model, optimizer = set_up("rows")
    with pytest.raises(ConfigError, match="every_steps is 1 on rank 0, 2 on rank 1"):
        deltachain.attach(model, optimizer, url=url, every_steps=rank + 1, dtype="BF16")
    assert not files(Path(folder))


def test_a_restart_with_another_recipe_on_one_rank_spoils_no_chain(tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    run(publishes, 2, chain.as_uri(), [{"quantization": "int8-row"}] * 2)
    before = files(chain)
    settings = [{"quantization": "int8-row"}, {"quantization": "fp8-row"}]
    run(refuses, 2, str(tmp_path), settings, ["on rank 1"])
    assert files(chain) == before
    run(publishes, 2, chain.as_uri(), [{"quantization": "int8-row"}] * 2)
    assert len(list(verify(Chain.open(open_store(chain))))) > 3


def publishes(rank: int, url: str, settings: Sequence[Mapping[str, Any]]) -> None:
    with Training(url, **settings[rank]) as training:
        for number in range(3):
            assert training.publish(number).result(DEADLINE_S).version == number + 1


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
    run(publishes, 2, chain.as_uri(), settings)
    opened = Chain.open(open_store(chain))
    list(verify(opened))
    assert {opened.read(v).manifest.metadata["run"] for v in range(4)} == {"a"}


# Stores of one URL that are not the same


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("nothing", "chain.json"),
        ("another chain", "has chain .* on rank 1"),
        ("a copy, which does not see what rank 0 commits", "version|manifest"),
    ],
)
def test_a_store_that_only_one_rank_sees_is_refused(
    tmp_path: Path, other: str, message: str
) -> None:
    if other != "nothing":
        run(publishes, 2, (tmp_path / "0").as_uri(), [{}, {}])
    if other == "another chain":
        run(publishes, 2, (tmp_path / "1").as_uri(), [{}, {}])
    elif other != "nothing":
        shutil.copytree(tmp_path / "0", tmp_path / "1")
    before = files(tmp_path / "1")
    run(opens_another_store, 2, str(tmp_path), message)
    assert files(tmp_path / "1") == before
    if other != "nothing":
        list(verify(Chain.open(open_store(tmp_path / "0"))))


class StoreOfAnotherHost(FaultyStore):
    shown = ""

    @property
    @override
    def url(self) -> str:
        return self.shown


def opens_another_store(rank: int, folder: str, message: str) -> None:
    store = StoreOfAnotherHost(open_store(Path(folder) / str(rank), writer=True))
    store.shown = (Path(folder) / "0").as_uri()
    with pytest.raises(DeltaChainError, match=message) as caught:
        Training(store.shown, store=store).__enter__()
    assert "same store" in caught.value.hint
