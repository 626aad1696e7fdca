from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from tests.unit.cli.support import invoke, ok, random_state, write_checkpoint
from tests.unit.publish.library import differing, llama, quantised_state


def test_a_checkpoint_is_quantised_pulled_and_verified(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "saved")
    chain, out = tmp_path / "chain", tmp_path / "out"
    ok("push", tmp_path / "saved", chain, "--quantization", "int8-row", "--step", 7)
    ok("verify", chain)
    ok("pull", chain, "--out", out)
    expected = quantised_state(model, "int8-row")
    assert differing(load_file(out / "model.safetensors"), expected) == set()
    again = ok("push", tmp_path / "saved", chain, "--quantization", "int8-row")
    assert "nothing to do" in again.stdout


def test_layers_that_are_left_are_options(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "saved")
    chain, out = tmp_path / "chain", tmp_path / "out"
    ignore = ("--ignore", "lm_head", "--ignore", "re:.*layers.1.mlp")
    ok("push", tmp_path / "saved", chain, "--quantization", "int8-row", *ignore)
    ok("pull", chain, "--out", out)
    left = ("lm_head", *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")))
    expected = quantised_state(model, "int8-row", left)
    assert differing(load_file(out / "model.safetensors"), expected) == set()
    alone = invoke("push", tmp_path / "saved", tmp_path / "other", "--ignore", "lm_head")
    assert alone.code == 2
    assert "--ignore needs --quantization" in alone.stderr


def test_what_cannot_be_quantised_ends_with_a_hint(tmp_path: Path) -> None:
    saved = write_checkpoint(tmp_path / "saved", random_state())
    unknown = invoke("push", saved, tmp_path / "chain", "--quantization", "int3")
    assert unknown.code == 2
    assert "expected one of: fp8-block," in " ".join(unknown.stderr.split())
    bare = invoke("push", saved, tmp_path / "chain", "--quantization", "int8-row")
    assert bare.code == 2
    assert not (tmp_path / "chain" / "chain.json").exists()
