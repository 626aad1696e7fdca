"""A worker that fails where and when a test says so, while it runs.

The test writes an order into the file that ``TEST_DELTACHAIN_STRIKE`` names, in the environment of
the server; one rank finds it at the place it is about, and carries it out.
"""

import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from deltachain.replica.batches import HostWrite
from deltachain.replica.host_copies import HostCopies
from deltachain.replica.rank import Rank, RankService
from deltachain.subscribe.targets import base as target
from deltachain.subscribe.targets import tensor_patch

VARIABLE: Final = "TEST_DELTACHAIN_STRIKE"

NUMBERS: Final[list[int]] = []
"""Number of the rank of this process among those of all data-parallel engines."""


def order(
    path: Path, at: str, *, rank: int = 0, nth: int = 1, kill: bool = False, lasting: bool = False
) -> None:
    """Let a rank fail."""
    found = {"at": at, "rank": rank, "nth": nth, "kill": kill, "lasting": lasting}
    path.with_suffix(".new").write_text(json.dumps(found))
    path.with_suffix(".new").replace(path)


def strike(at: str) -> None:
    path = Path(os.environ.get(VARIABLE) or os.devnull)
    if not path.is_file():
        return
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return  # another rank has carried it out
    if found["at"] != at or found["rank"] not in NUMBERS:
        return
    if found["nth"] > 1:
        order(path, **{**found, "nth": found["nth"] - 1})
        return
    if not found["lasting"]:
        path.unlink()
    if found["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(f"struck at {at}")


def _before(at: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def struck(*args: Any, **kwargs: Any) -> Any:
        strike(at)
        return original(*args, **kwargs)

    return struck


def _loading(
    original: Callable[[HostCopies, Iterable[str]], Iterator[tuple[str, Tensor]]],
) -> Callable[[HostCopies, Iterable[str]], Iterator[tuple[str, Tensor]]]:
    def struck(copies: HostCopies, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for pair in original(copies, names):
            strike("load")
            yield pair

    return struck


def _numbered(original: Callable[..., None]) -> Callable[..., None]:
    def made(service: RankService, model: Any, number: int, settings: Any) -> None:
        NUMBERS[:] = [number]
        original(service, model, number, settings)

    return made


RankService.__init__ = _numbered(RankService.__init__)  # type: ignore[method-assign]
Rank.stage = _before("stage", Rank.stage)  # type: ignore[method-assign]
HostCopies.clones = _loading(HostCopies.clones)  # type: ignore[method-assign, assignment]
vars(target)["write_patch"] = _before("write", tensor_patch.write)
HostWrite.run = _before("write", HostWrite.run)  # type: ignore[method-assign]
