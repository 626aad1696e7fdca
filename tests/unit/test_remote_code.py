"""What names code elsewhere does not travel, unless that is asked for."""

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltachain.chain.chain import Chain
from deltachain.checkpoint import read_assets
from deltachain.format.documents import Table
from deltachain.publish import PublishConfig, Publisher
from deltachain.remote_code import without_remote_code
from deltachain.store import MemoryStore, open_store
from deltachain.subscribe.targets.folder import write_assets
from tests.support.models import TinyModel
from tests.support.values import present
from tests.unit.cli.support import ok, random_state, write_checkpoint

EVIL = "attacker/repo--modeling.Evil"


def stripped(document: Any) -> Any:
    data = json.dumps(document).encode()
    kept = present(without_remote_code("config.json", data, trusted=False, where="here"))
    return json.loads(kept)


@pytest.mark.parametrize(
    ("document", "left"),
    [
        ({"auto_map": {"AutoModel": EVIL}, "a": 1}, {"a": 1}),
        ({"auto_map": {"AutoTokenizer": [EVIL, None]}}, {}),
        ({"auto_map": {"A": ["t.Slow", EVIL]}}, {"auto_map": {"A": ["t.Slow", None]}}),
        ({"auto_map": {"A": "modeling.A", "B": EVIL}}, {"auto_map": {"A": "modeling.A"}}),
        ({"auto_map": EVIL}, {}),
        ({"text_config": {"auto_map": {"A": EVIL}, "a": 1}}, {"text_config": {"a": 1}}),
        ([{"deep": [{"auto_map": {"A": EVIL}}]}], [{"deep": [{}]}]),
        ({"custom_pipelines": {"p": {"impl": EVIL}}, "a": 1}, {"a": 1}),
        ({"auto_map": {"A": "m.A"}, "_name_or_path": "a/b"}, {"auto_map": {"A": "m.A"}}),
        ({"_name_or_path": "a/b", "a": {"auto_map": "m.A"}}, {"a": {"auto_map": "m.A"}}),
        ([{"idx": 0, "type": EVIL}], [{"idx": 0, "type": None}]),
        ({"auto_mapping": {"parent_library": EVIL}}, {"auto_mapping": {"parent_library": None}}),
        ({"auto_map": {"A": "m.A"}, "name_or_path": "a/b"}, {"auto_map": {"A": "m.A"}}),
        ([{"type": "attacker/repo--sub/mod.X"}], [{"type": None}]),
        ([{"type": "/opt/planted--mod.X"}], [{"type": None}]),
        ({"_attn_implementation": "attacker/kernel@main:run", "a": 1}, {"a": 1}),
        (
            {"attn_implementation": {"": "paged|attacker/kernel", "x": "sdpa"}},
            {"attn_implementation": {"x": "sdpa"}},
        ),
        ({"text_config": {"experts_implementation": "attacker/kernel"}}, {"text_config": {}}),
        ({"_attn_implementation_internal": "attacker/kernel"}, {}),
        ({"_linear_attn_implementation": "attacker/kernel"}, {}),
    ],
)
def test_code_elsewhere_is_taken_out_wherever_it_is_named(document: Any, left: Any) -> None:
    assert stripped(document) == left


@pytest.mark.parametrize(
    "data",
    [
        b"-- no JSON",
        b"[" * 100_000 + b"--",
        b"[" * 1_000 + json.dumps({"auto_map": {"A": EVIL}}).encode() + b"]" * 1_000,
        b"\xff--",
        b'{"auto_map": {"A": "attacker/repo--modeling.Evil"}, "a": "\\ud800"}',
    ],
)
def test_a_file_that_cannot_be_examined_is_left_out(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert without_remote_code("config.json", data, trusted=False, where="here") is None
    assert "left out config.json" in caplog.text
    assert without_remote_code("config.json", data, trusted=True, where="here") == data


@pytest.mark.parametrize(
    "data",
    [
        b'{"auto_map": {"AutoModel": "modeling_x.X"}}',
        b'{"a":"--", "auto_map":{"A":"modeling.A"}}',
        b'{"chat_template": "a -- b"}',
        b'{"type": "sentence_transformers.models.Transformer", "a": "b/c -- d"}',
        b'{"_attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}',
        b'{"_name_or_path": "/cache/models--org--model/snapshots/1.5"}',
    ],
)
def test_everything_else_keeps_its_bytes(data: bytes) -> None:
    assert without_remote_code("config.json", data, trusted=False, where="here") == data


@pytest.mark.parametrize("hyphen", [r"\u002d", r"\u002D"])
def test_no_other_spelling_and_no_field_given_twice_gets_through(hyphen: str) -> None:
    for dashes in (f"-{hyphen}", f"{hyphen}-", hyphen * 2):
        data = r'{"auto\u005fmap": {"A": "evil"}}'.replace("evil", EVIL.replace("--", dashes))
        assert json.loads(data) == {"auto_map": {"A": EVIL}}
        found = without_remote_code("config.json", data.encode(), trusted=False, where="here")
        assert found is not None
        assert json.loads(found) == {}
    twice = b'{"auto_map": {"A": "attacker/repo--m.Evil"}, "auto_map": {"A": "m.A"}}'
    left = present(without_remote_code("config.json", twice, trusted=False, where="here"))
    assert b"Evil" not in left
    assert json.loads(left) == {"auto_map": {"A": "m.A"}}


def test_a_chain_of_whole_weights_brings_no_configuration_of_an_adapter(tmp_path: Path) -> None:
    """Loaders that see one load the base it names instead of the weights beside it."""
    adapter = {"adapter_config.json": b'{"base_model_name_or_path": "attacker/repo"}'}
    both = adapter | {"config.json": b"{}"}
    for name, files, written in (
        ("a", both, ["config.json"]),
        ("b", adapter, list(adapter)),
        ("base_model.model.a", both, list(both)),
    ):
        table = Table(tensors=((name, "F32", (1,)),))
        chain = Chain.create(MemoryStore(), table, chain_id="one", time=0.0, assets=files)
        folder = tmp_path / name
        folder.mkdir()
        assert write_assets(chain, folder) == written


def test_arrays_with_pickled_objects_neither_go_into_a_chain_nor_come_out(tmp_path: Path) -> None:
    arrays = {"numbers.npy": np.arange(3), "objects.npy": np.array([{}], dtype=object)}
    for name, array in arrays.items():
        np.save(tmp_path / name, array)
    files = {name: (tmp_path / name).read_bytes() for name in arrays}
    zipped = io.BytesIO()
    np.savez(zipped, a=arrays["objects.npy"])
    files["archive.npy"] = zipped.getvalue()
    assert list(read_assets(tmp_path)) == ["numbers.npy"]
    chain = Chain.create(MemoryStore(), Table(tensors=()), chain_id="one", time=0.0, assets=files)
    (tmp_path / "out").mkdir()
    assert write_assets(chain, tmp_path / "out") == ["numbers.npy"]


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "processor_config.json", "other.json"]
)
def test_a_hostile_chain_cannot_name_code_to_a_follower(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = json.dumps({"auto_map": {"AutoModel": EVIL}, "model_type": "x"}).encode()
    files = {name: data}
    chain = Chain.create(MemoryStore(), Table(tensors=()), chain_id="one", time=0.0, assets=files)
    with caplog.at_level(logging.WARNING, "deltachain"):
        assert write_assets(chain, tmp_path) == [name]
    assert json.loads((tmp_path / name).read_bytes()) == {"model_type": "x"}
    assert EVIL in caplog.text
    assert name in caplog.text
    (tmp_path / name).unlink()
    write_assets(chain, tmp_path, trusted=True)
    assert (tmp_path / name).read_bytes() == data


@pytest.mark.parametrize("trusted", [False, True])
def test_a_publisher_names_no_code_elsewhere_unless_told_to(*, trusted: bool) -> None:
    store = MemoryStore()
    config = PublishConfig(url=store.url, trust_remote_code=trusted)
    files = {"config.json": json.dumps({"auto_map": {"A": EVIL}}).encode()}
    with Publisher(config, store=store).attach(TinyModel(), assets=files):
        found = dict(Chain.open(store).assets())
    assert (EVIL.encode() in found["config.json"]) is trusted


@pytest.mark.parametrize("pushed", [False, True])
@pytest.mark.parametrize("pulled", [False, True])
def test_push_and_pull_must_both_trust_it(tmp_path: Path, *, pushed: bool, pulled: bool) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", random_state())
    (checkpoint / "config.json").write_text(json.dumps({"auto_map": {"A": EVIL}}))
    flag = "--trust-remote-code"
    said = ok("push", checkpoint, tmp_path / "chain", *[flag] * pushed)
    assert (EVIL in said.stderr) is not pushed
    ok("pull", tmp_path / "chain", "--out", tmp_path / "out", *[flag] * pulled)
    there = EVIL in (tmp_path / "out" / "config.json").read_text()
    assert there is (pushed and pulled)
    assets = dict(Chain.open(open_store(str(tmp_path / "chain"))).assets())
    assert (EVIL.encode() in assets["config.json"]) is pushed


@pytest.mark.parametrize("header", ["(" * 9000, "-" * 9000, "{'descr': '<f4', (", ""])
def test_a_hostile_header_of_an_array_leaves_the_file_out(header: str) -> None:
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    assert without_remote_code("a.npy", data, trusted=False, where="x") is None
    assert without_remote_code("a.npy", data[:7], trusted=False, where="x") is None
