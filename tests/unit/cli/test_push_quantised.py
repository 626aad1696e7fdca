import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from deltachain import Publisher
from tests.support.models import plain_model
from tests.unit.cli.support import invoke, ok, random_state, write_checkpoint
from tests.unit.publish.library import differing, llama, quantised_state

FILES = {"config.json": b'{"a": 1, "use_cache": true}', "tokenizer.json": b"{}"}

KILLED = """
import os, signal, sys
from deltachain.subscribe.targets import folder
folder.write_assets = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
from deltachain.cli import main
main()
"""


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    url = tmp_path / "chain"
    with Publisher(str(url)).attach(plain_model(), assets=FILES) as publisher:
        publisher.flush()
    return url


def small(folder: Path) -> dict[str, bytes]:
    """Contents of the small files that are there."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


def test_a_follower_killed_between_swap_and_small_files_writes_them_when_started_again(
    chain: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["follow", str(chain), "--out", str(out), "--once"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], check=False)
    assert (killed.returncode, small(out)) == (-9, {})
    assert list(out.glob("*.safetensors"))
    ok(*words)
    assert small(out) == FILES


def test_files_of_another_meaning_are_kept_and_named(
    chain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for command in ("pull", "follow"):
        out = tmp_path / command
        out.mkdir()
        own = b'{"a": 2, "use_cache": false, "rope_theta": 5, "quantization_config": {"bits": 4}}'
        (out / "config.json").write_bytes(own)
        once = ["--once"] if command == "follow" else []
        caplog.clear()
        ok(command, chain, "--out", out, *once)
        assert small(out) == FILES | {"config.json": own}
        assert "config.json ('a', 'rope_theta', 'quantization_config')" in caplog.text
        assert "tokenizer.json" not in caplog.text


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


def test_a_pushed_chain_of_packed_codes_is_followed(tmp_path: Path) -> None:
    model = llama()
    chain, out = tmp_path / "chain", tmp_path / "out"
    for number in range(3):
        saved = tmp_path / f"saved-{number}"
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[number] += 0.01
        model.save_pretrained(saved)
        ok("push", saved, chain, "--quantization", "nvfp4a16", "--step", number)
        ok("follow", chain, "--out", out, "--once")
        expected = quantised_state(copy.deepcopy(model), "nvfp4a16")
        assert differing(load_file(out / "model.safetensors"), expected) == set()
    ok("verify", chain)
    ok("pull", chain, "--out", tmp_path / "pulled", "--version", 1)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "nvfp4-pack-quantized"
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    assert loaded(torch.arange(9)[None]).logits.isfinite().all()


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
    ok("push", tmp_path / "saved", tmp_path / "alike", "--quantization", out)
    ok("pull", tmp_path / "alike", "--out", tmp_path / "again")
    assert differing(load_file(tmp_path / "again" / "model.safetensors"), expected) == set()
    both = invoke("push", tmp_path / "saved", chain, "--quantization", out, "--ignore", "lm_head")
    assert both.code == 2
    assert "exclude each other" in both.stderr
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
