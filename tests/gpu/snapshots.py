"""Snapshot of a model on a device, on the host and there; needs deltachain's own packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from deltachain.publish.model.source import collect_weights
from deltachain.publish.snapshot import Snapshot
from deltachain.publish.snapshot_memory import SnapshotPlace
from deltachain.testing.models import plain_model, train_


def snapshot_checks(where: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """The check of a snapshot in each place, with weights as they are and with fp32 masters."""
    places: tuple[SnapshotPlace, ...] = ("host", "device")
    for place in places:
        for dtype in (torch.bfloat16, torch.float32):
            check = partial(check_snapshot, where, place, dtype)
            yield f"snapshot.{place}.{str(dtype).removeprefix('torch.')}", check


def check_snapshot(where: str, place: SnapshotPlace, dtype: torch.dtype) -> None:
    """It finds what the snapshot of a copy on the host finds; it is restored, and done again."""
    host_model, model = plain_model(dtype=dtype), plain_model(dtype=dtype).to(where)
    host = Snapshot(collect_weights(host_model, dtype="BF16"))
    on_device = torch.device(where).type == "cpu"
    ours = Snapshot(collect_weights(model, dtype="BF16"), where=place, on_device=on_device)
    weights = collect_weights(model, dtype="BF16").weights
    assert ours.state == host.state
    for seed in range(3):
        train_(host_model, seed)
        model.load_state_dict(host_model.state_dict())
        expected, found = host.diff_(), ours.diff_()
        assert found.live.keys() == expected.live.keys() != set()
        for name, changes in expected.live.items():
            for one, other in zip(changes, found.live[name], strict=True):
                np.testing.assert_array_equal(one, other)
        ours.restore(found)
        ours.redo(found)
        assert ours.state == host.state
        for weight in weights:
            np.testing.assert_array_equal(ours.bits(weight), host.bits(weight))
