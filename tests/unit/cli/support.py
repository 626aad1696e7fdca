"""Runs commands in this process, and makes checkpoints for them."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from typer.main import get_command

from deltachain.checkpoint import Checkpoint
from deltachain.cli.app import app
from deltachain.types import BITS_DTYPES, WIRE_DTYPES, Bits, TensorSpec
from tests.support.files import write_weights
from tests.support.values import present

COMMAND = get_command(app)  # once: putting it together takes longer than running it

State = dict[str, Bits]

SPECS = (
    TensorSpec("embed.weight", "BF16", (96, 32)),
    TensorSpec("layers.0.bias", "F16", (64,)),
    TensorSpec("layers.0.norm", "F32", (32,)),
    TensorSpec("layers.0.weight", "BF16", (64, 64)),
    TensorSpec("layers.0.weight_scale", "F8_E8M0", (16,)),
    TensorSpec("steps", "I64", ()),
)


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str

    @property
    def told(self) -> str:
        """What is on stderr, however it is wrapped."""
        return " ".join(self.stderr.split())

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON object on stdout, which holds nothing else."""
        found = json.loads(self.stdout)
        assert isinstance(found, dict)
        return found


def invoke(*args: object, command: Any = COMMAND) -> Done:
    """Run the command line in this process; what it does not answer itself is raised."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            name = "deltachain" if command is COMMAND else "python -m"
            command.main([str(arg) for arg in args], prog_name=name)
        except SystemExit as done:
            code = done.code
    assert isinstance(code, int)
    return Done(code, out.getvalue(), err.getvalue())


def ok(*args: object) -> Done:
    done = invoke(*args)
    assert done.code == 0, done.stderr
    return done


def refused(
    *args: object, code: int, said: str | tuple[str, ...] = "", command: Any = COMMAND
) -> Done:
    """Run a command that ends with this code, and tells why on stderr."""
    done = invoke(*args, command=command)
    assert done.code == code, (done.stdout, done.stderr)
    for part in (said,) if isinstance(said, str) else said:
        assert " ".join(part.split()) in done.told
    return done


@dataclass(frozen=True)
class Running:
    """A command in a process of its own."""

    process: subprocess.Popen[str]

    def line(self) -> str:
        return present(self.process.stdout).readline()

    def error_line(self) -> str:
        return present(self.process.stderr).readline()

    def end(self, number: int) -> Done:
        """Send a signal and wait for the end; what was printed since the last line read."""
        self.process.send_signal(number)
        stdout, stderr = self.process.communicate(timeout=60)
        return Done(self.process.returncode, stdout, stderr)


@contextmanager
def running(*words: object, module: str = "deltachain", **environment: object) -> Iterator[Running]:
    """Start a command; kill it in the end."""
    variables = {name: str(value) for name, value in environment.items()}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, words)],
        env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Running(process)
    finally:
        process.kill()
        process.communicate()


def random_state(seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    return {
        s.name: np.frombuffer(rng.bytes(s.nbytes), s.bits_dtype).copy().reshape(-1) for s in SPECS
    }


def train(state: State, seed: int, share: float = 0.02) -> State:
    """A copy in which a few elements of most tensors took a small step."""
    rng = np.random.default_rng(seed)
    after = {name: bits.copy() for name, bits in state.items()}
    for name, bits in after.items():
        if name != "layers.0.norm":
            chosen = rng.random(bits.size) < share
            bits[chosen] += rng.choice([1, 2, 300], chosen.sum()).astype(bits.dtype)
    after["steps"] += np.uint64(1)
    return after


def write_checkpoint(folder: Path, state: Mapping[str, Bits]) -> Path:
    """A checkpoint folder with what belongs beside weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / "model.safetensors", SPECS, lambda spec: state[spec.name])
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def read_checkpoint(path: Path) -> State:
    checkpoint = Checkpoint(path)
    return {name: checkpoint.bits(name).copy() for name in checkpoint.specs}


def same(one: Mapping[str, Bits], other: Mapping[str, Bits]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].tobytes() == other[name].tobytes() for name in one
    )


def safetensors_bytes(
    tensors: Mapping[str, tuple[str, tuple[int, ...], Bits]], *, padding: int = 0
) -> bytes:
    """A safetensors file put together by hand, in the order given, at any alignment."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, bits) in tensors.items():
        assert bits.dtype == BITS_DTYPES[WIRE_DTYPES[dtype]]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + bits.nbytes)}
        at += bits.nbytes
    text = json.dumps(header).encode() + b" " * padding
    data = b"".join(bits.tobytes() for _, _, bits in tensors.values())
    return len(text).to_bytes(8, "little") + text + data


@dataclass(frozen=True)
class Pushed:
    """A chain of four versions, and what each of them holds."""

    url: Path
    states: tuple[State, ...]
