"""A program of one vLLM: ``theirs`` follows files of a chain, ``ours`` a chain of TRL's files."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.config import WeightTransferConfig

import deltachain
from deltachain.bridges import dialect_of
from deltachain.bridges.export import Exported, Exporter, HostCopy
from deltachain.bridges.imports import Importer
from deltachain.store import open_store
from tests.engines.trainer import Run
from tests.engines.vllm.ray_actor import Replica
from tests.peers import sources
from tests.peers.systems import State, bytes_of, read, trl_trainer
from tests.support.values import present
from tests.unit.bridges.test_bridges import same

VERSIONS = 20


def state(run: Run) -> State:
    return {name: one.detach().bfloat16().clone() for name, one in run.model.named_parameters()}


def exporter(url: str, folder: Path, dialect: str) -> Callable[[], Exported]:
    subscriber = deltachain.Subscriber(url, HostCopy())
    made = Exporter(subscriber, open_store(str(folder)), (dialect, dialect_of(dialect)))

    def write() -> Exported:
        subscriber.update()
        return made.write(present(subscriber.version))

    return write


def theirs(run: Run, root: Path) -> None:
    """TRL's engine in vLLM and slime's pull read the files of each version."""
    url = str(root / "c")
    llm = Replica(
        str(run.base),
        weight_transfer_config=WeightTransferConfig(backend="trl-draft"),
        worker_extension_cls="tests.peers.trl_worker.WorkerExtension",
    )
    config = deltachain.PublishConfig(url=url, dtype="BF16", when_busy="wait")
    publisher = deltachain.Publisher(config).attach(run.model)
    trl, slime = exporter(url, root / "trl", "trl-v1"), exporter(url, root / "slime", "slime")
    pull, local = sources.slime_receiver().pull, root / "local"
    llm.collective_rpc("init_weight_transfer_engine", args=({},))
    for number in range(VERSIONS + 1):
        if number:
            run.step()
            publisher.publish(step=number).result()
        where: dict[str, Any] = {"repo_id": str(root / "trl"), "filename": trl().key}
        llm.collective_rpc("start_weight_update")
        llm.collective_rpc("update_weights", args=(where,))
        llm.collective_rpc("finish_weight_update")
        assert llm.holds(run.saved()), number
        pull(str(local), f"{root}/slime/weight_v000000", f"{root}/slime", slime().number)
        expected = {name: bytes_of(one) for name, one in state(run).items()}
        same(read(local), expected)
    publisher.close()


def ours(run: Run, root: Path) -> None:
    """Our vLLM follows a chain of the files that TRL's third draft writes."""
    llm, url = Replica(str(run.base)), str(root / "c")
    files = open_store(str(root / "files"))
    write = trl_trainer(str(root / "files"), state(run), 3)
    with Importer(files, dialect_of("trl"), deltachain.PublishConfig(url=url)) as importer:
        list(importer.versions())
        llm.follow(url)
        for number in range(1, VERSIONS + 1):
            run.step()
            write(number, state(run))
            (done,) = importer.versions()
            assert done.step == number
            assert llm.seen(done.version, run.saved()) == (str(done.version), True)


if __name__ == "__main__":
    way, folder = sys.argv[1:]
    {"theirs": theirs, "ours": ours}[way](Run(Path(folder)), Path(folder))
    sys.stdout.write(json.dumps({"versions": VERSIONS}) + "\n")
