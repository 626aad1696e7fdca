import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest
import torch
from torch import nn

from deltachain.checkpoint import Checkpoint
from deltachain.format.keys import object_digest
from deltachain.replica.host_copies import HostCopies
from deltachain.replica.layout import derived, kept_proof, reloads
from deltachain.replica.layout.classes import agree
from deltachain.replica.layout.discover import Layout, discover
from deltachain.replica.layout.kept_proof import KEPT, find_layout
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from deltachain.replica.rank import Rank
from deltachain.replica.settings import RankSettings
from tests.support.engine import ODD, FakeModel, Sharding, read, save, trained
from tests.unit.replica.layout.conftest import Make
from tests.unit.replica.layout.loaders import PLANNED, OneLayer

SHAPE: Final = Sharding(odd=tuple(sorted({*ODD, "packed", "shadow"} - {"stuck"})))


class Start(NamedTuple):
    """One start of an engine, and how its layout was found."""

    layout: Layout
    discovered: bool


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Layout]:
    """Layouts that were discovered from nothing."""
    found: list[Layout] = []

    def seen(*arguments: Any, **more: Any) -> Layout:
        found.append(discover(*arguments, **more))
        return found[-1]

    monkeypatch.setattr(kept_proof, "discover", seen)
    return found


Starts = Callable[..., Start]


@pytest.fixture
def start(tmp_path: Path, searches: list[Layout]) -> Starts:
    """Starts an engine with layers of every class, which keeps its proofs in one folder."""
    folder = save(trained(SHAPE), tmp_path / "model")

    def run(change: Callable[[FakeModel], object] = lambda _: None) -> Start:
        engine, checkpoint = FakeModel(SHAPE, 0, folder), Checkpoint(folder)
        change(engine)
        source = LoadedCheckpoint(checkpoint, checkpoint.specs, {})
        before = {name: tensor.clone() for name, tensor in engine.computed().items()}
        count = len(searches)
        layout = find_layout(engine, source, tmp_path / "proofs").layout
        assert before.keys() == engine.computed().keys()
        assert all(torch.equal(before[n], t) for n, t in engine.computed().items())
        return Start(layout, len(searches) > count)

    return run


def kept(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "proofs").glob("*.json")
    return file


def test_a_second_start_proves_the_same_layout_without_a_search(start: Starts) -> None:
    first, second = start(), start()
    assert (first.discovered, second.discovered) == (True, False)
    assert {"in_place", "loaded", "reloaded"} <= set(first.layout.classes.values())
    assert second.layout.report() == first.layout.report()
    assert second.layout.groups == first.layout.groups
    assert second.layout.comparable == first.layout.comparable
    assert second.layout.readable.keys() == first.layout.readable.keys()
    assert second.layout.idle == first.layout.idle


def test_a_folder_and_a_file_are_this_users(start: Starts, tmp_path: Path) -> None:
    start()
    assert (tmp_path / "proofs").stat().st_mode & 0o777 == 0o700
    assert kept(tmp_path).read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("part", [1, 300])
def test_models_are_tried_alike_whole_and_in_parts(
    start: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    first = start()
    kept(tmp_path).unlink()
    for module in (derived, reloads):
        monkeypatch.setattr(module, "PART", part)
    again = start()
    assert again.discovered
    assert again.layout.report() == first.layout.report()
    assert again.layout.groups == first.layout.groups


# Forgeries, of which none is believed


def rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change what a proof says, with a digest that matches."""

    def forge(file: Path) -> None:
        proof = msgspec.json.decode(file.read_bytes().partition(b"\n")[2])
        change(proof)
        body = msgspec.json.encode(proof)
        file.write_bytes(f"{object_digest(body)}\n".encode() + body)

    return forge


def of(kind: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda proof: next(one for one in proof["tensors"].values() if one["kind"] == kind)


def becomes(kind: str, other: str) -> Callable[[Path], None]:
    """Let a tensor, with its group if it had one, be of another class."""

    def change(proof: dict[str, Any]) -> None:
        name = next(n for n, one in proof["tensors"].items() if one["kind"] == kind)
        groups = [one for one in proof["groups"] if name in one["names"]]
        names = groups[0]["names"] if groups else [name]
        for one in names:
            proof["tensors"][one]["kind"] = other
        if other == "in_place":
            proof["groups"] = [one for one in proof["groups"] if one not in groups]
        elif groups:
            groups[0]["method"] = other
        else:
            layers = [name.rpartition(".")[0]]
            proof["groups"].append(
                {"method": other, "names": [name], "layers": layers, "comparable": False}
            )

    return rewritten(change)


def flipped(at: int) -> Callable[[Path], None]:
    def forge(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    return forge


def linked(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def as_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def deep(file: Path) -> None:
    body = b"[" * 100_000
    file.write_bytes(f"{object_digest(body)}\n".encode() + body)


def dropped(proof: dict[str, Any]) -> None:
    del proof["tensors"][next(iter(proof["tensors"]))]


def first_group(proof: dict[str, Any]) -> dict[str, Any]:
    return proof["groups"][0]  # type: ignore[no-any-return]


FORGERIES: Final[dict[str, Callable[[Path], object]]] = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "one bit of the digest": flipped(3),
    "one bit of a name": flipped(120),
    "the last bit": flipped(-1),
    "another digest": lambda file: file.write_bytes(b"0" * 64 + file.read_bytes()[64:]),
    "a link": linked,
    "a pipe": as_fifo,
    "nested without end": deep,
    "of another engine": rewritten(lambda proof: proof.update(fingerprint="0" * 64)),
    "an unknown field": rewritten(lambda proof: proof.update(more=1)),
    "a tensor less": rewritten(dropped),
    "a tensor more": rewritten(
        lambda proof: proof["tensors"].update(other=dict(of("in_place")(proof)))
    ),
    "an unknown class": rewritten(lambda proof: of("in_place")(proof).update(kind="magic")),
    "in place, but refused": rewritten(lambda proof: of("in_place")(proof).update(kind="refused")),
    "in place, but absent": rewritten(lambda proof: of("in_place")(proof).update(kind="absent")),
    "other windows": rewritten(lambda proof: of("in_place")(proof).update(windows=[[1, [3], [1]]])),
    "loaded, but in place": becomes("loaded", "in_place"),
    "reloaded, but in place": becomes("reloaded", "in_place"),
    "reloaded, but loaded": becomes("reloaded", "loaded"),
    "reloaded, but repacked": becomes("reloaded", "repacked"),
    "no groups": rewritten(lambda proof: proof.update(groups=[])),
    "a group twice": rewritten(lambda proof: proof["groups"].append(first_group(proof))),
    "a group of no layer": rewritten(lambda proof: first_group(proof).update(layers=["other"])),
    "read back where it is not": rewritten(lambda proof: of("loaded")(proof).update(readable=True)),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_no_forged_proof_is_believed(start: Starts, tmp_path: Path, forgery: str) -> None:
    first = start()
    FORGERIES[forgery](kept(tmp_path))
    again = start()
    assert again.discovered
    assert again.layout.report() == first.layout.report()
    assert not start().discovered, "the search kept its result in the place of the forgery"


# Other engines: their fingerprints differ, and if they did not, tests of the model would


def set_option(engine: FakeModel) -> None:
    engine.root.get_submodule("norm").tiles = 8  # type: ignore[assignment]


def replace_class(engine: FakeModel) -> None:
    module = engine.root.get_submodule("norm")
    module.__class__ = type("Other", (nn.Module,), {})


@pytest.mark.parametrize("change", [set_option, replace_class])
def test_another_engine_is_searched(start: Starts, change: Callable[[FakeModel], None]) -> None:
    assert [start().discovered, start(change).discovered] == [True, True]
    assert not start().discovered, "each keeps its own"


def test_options_in_the_environment_are_the_engines(
    start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    monkeypatch.setenv("VLLM_RPC_PORT", "1234")
    assert not start().discovered, "it differs from start to start"
    monkeypatch.setenv("VLLM_CPU_KERNELS", "other")
    assert start().discovered


def test_another_version_of_a_package_is_another_engine(
    start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    monkeypatch.setattr(kept_proof, "version", lambda _: "0.0.1")
    assert start().discovered


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines have one fingerprint: only what is tried again can tell them apart."""
    monkeypatch.setattr(kept_proof, "fingerprint_of", lambda *_: "0" * 64)


def with_hidden_copy(model: OneLayer) -> None:
    model.pack()


def rearranged(model: OneLayer) -> None:
    model.p.data.copy_(model.p.data.flip(0))


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("change", [with_hidden_copy, rearranged])
def test_a_model_that_is_not_as_it_was_is_searched_even_so(
    one_layer: Make,
    tmp_path: Path,
    searches: list[Layout],
    change: Callable[[OneLayer], None],
) -> None:
    model, source = one_layer(PLANNED["copy"])
    for _ in range(2):
        find_layout(model, source, tmp_path / "proofs")
    assert len(searches) == 1
    change(model)
    assert find_layout(model, source, tmp_path / "proofs")[0].report() == searches[-1].report()
    assert len(searches) == 2


@pytest.mark.usefixtures("blind")
def test_places_are_recorded_anew(one_layer: Make, tmp_path: Path, searches: list[Layout]) -> None:
    model, source = one_layer(PLANNED["copy"])
    find_layout(model, source, tmp_path / "proofs")
    model.p.data = model.p.data.clone()
    (place,) = find_layout(model, source, tmp_path / "proofs")[0].places["w"]
    assert len(searches) == 1
    assert place.live.data_ptr() == model.p.data_ptr()


@pytest.mark.usefixtures("blind")
def test_a_reload_that_does_something_else_now_is_searched(
    one_layer: Make, tmp_path: Path, searches: list[Layout]
) -> None:
    model, source = one_layer(PLANNED["copy"])
    model.pack()
    for _ in range(2):
        assert find_layout(model, source, tmp_path / "proofs")[0].classes == {"w": "reloaded"}
    assert len(searches) == 1
    model.reloader = lambda _, __: None
    assert find_layout(model, source, tmp_path / "proofs")[0].classes == {"w": "refused"}
    assert len(searches) == 2


def test_what_an_engine_held_when_it_was_proven_is_not_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, loads, load = save(trained(SHAPE), tmp_path / "model"), list[object](), HostCopies.load
    monkeypatch.setattr(HostCopies, "load", lambda *given: loads.append(load(*given)))

    def loaded(change: Callable[[FakeModel], object] = lambda _: None) -> tuple[bool, int]:
        engine, specs = FakeModel(SHAPE, 0, folder), Checkpoint(folder).specs
        rank, count = Rank(engine, specs.values(), {}, proofs=tmp_path / "proofs"), len(loads)
        agreed = agree(specs.values(), [rank.report()])
        rank.agree(agreed.classes, {name: holders[0] for name, holders in agreed.holders.items()})
        change(engine)
        return rank.loads_the_same(), len(loads) - count

    def with_other_bits(engine: FakeModel) -> None:
        full = {name: one + 1 for name, one in read(folder).items() if "packed" in name}
        engine.reload(full.items())

    assert [loaded(), loaded()] == [(True, 0), (True, 0)], "a search, and its proof"
    assert loaded(with_other_bits) == (False, 1)
    rewritten(lambda proof: proof.update(loaded="0" * 64))(kept(tmp_path))
    assert [loaded(), loaded()] == [(True, 1), (True, 0)], "kept once more"
    save(trained(SHAPE, seed=1), folder)
    assert loaded() == (True, 1), "another checkpoint"


# Folders


def test_without_room_a_proof_is_not_kept(
    start: Starts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    assert start().discovered
    assert "cannot keep the proof of a layout" in caplog.text
    assert not list((tmp_path / "proofs").iterdir())


def test_a_folder_has_the_newest_proofs_alone(start: Starts, tmp_path: Path) -> None:
    start()
    for number in range(2 * KEPT):
        file = tmp_path / "proofs" / f"{number}.json"
        file.touch()
        os.utime(file, (number, number))
    start(set_option)
    names = {file.name for file in (tmp_path / "proofs").iterdir()}
    assert len(names) == KEPT
    assert f"{2 * KEPT - 1}.json" in names
    assert "0.json" not in names


def test_nothing_is_kept_where_it_is_off(
    one_layer: Make, searches: list[Layout], tmp_path: Path
) -> None:
    spool = {"DELTACHAIN_SPOOL": str(tmp_path)}
    assert RankSettings.of(spool).proofs == tmp_path / "proofs"
    assert RankSettings.of({**spool, "DELTACHAIN_PROOFS": "/other"}).proofs == Path("/other")
    folder = RankSettings.of({**spool, "DELTACHAIN_PROOFS": "off"}).proofs
    model, source = one_layer(PLANNED["copy"])
    for _ in range(2):
        find_layout(model, source, folder)
    assert len(searches) == 2
    assert not (tmp_path / "proofs").exists()
