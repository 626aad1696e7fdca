"""What ranks do in a trial of TRL's weight sync; every function here runs on each of them."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from torch import distributed
from torch.distributed.tensor.debug import CommDebugMode

from deltachain.control.fleet import Wait
from deltachain.control.transfer import DeltaChainWeightTransfer
from tests.ranks.layouts import set_up, train_step
from tests.ranks.trials import check

SYNCS = 3


def syncs(rank: int, url: str, folder: str, wait: Wait) -> None:
    model, optimizer = set_up("rows")
    trainer: Any = SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(unwrap_model=lambda it: it),
        state=SimpleNamespace(global_step=0),
        _streaming_iter=lambda: iter(()),
        _metrics={"train": defaultdict(list)},
    )
    transfer = DeltaChainWeightTransfer(url, wait=wait, dtype="BF16", when_busy="wait")
    transfer.attach(trainer)
    for step in range(SYNCS + 1):
        if step:
            train_step("rows", model, optimizer, step)
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
            check(rank, step, model, url, folder)
    if rank == 0:  # as TRL does
        transfer.destroy()
    distributed.barrier()
    check(rank, SYNCS, model, url, f"{folder}/last")
