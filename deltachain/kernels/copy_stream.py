"""Streams of a diff on a device, and the one place that waits for them; no-ops on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class CopyStream:
    """The caller's stream on a device, which computes, and one that copies.

    Args:
        where: The device; on the host there are no streams, and everything is done at once.

    Attributes:
        to_device_nbytes: Bytes copied to the device so far.
        to_host_nbytes: Bytes copied to the host so far.
    """

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.to_device_nbytes = self.to_host_nbytes = 0
        self._copies = torch.cuda.Stream(where) if where.type == "cuda" else None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Make the device current, so that kernels are launched on the caller's stream there."""
        if self._copies is None:
            yield
            return
        with torch.cuda.device(self.where):
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Enqueue what is done within on the copying stream."""
        if self._copies is None:
            yield
            return
        with torch.cuda.stream(self._copies):
            yield

    def copies_follow(self, event: torch.cuda.Event | None) -> None:
        """Let later copies start after an event."""
        if self._copies is not None and event is not None:
            self._copies.wait_event(event)

    def computing_follows(self, event: torch.cuda.Event | None) -> None:
        """Let later kernels start after an event."""
        if event is not None:
            torch.cuda.current_stream(self.where).wait_event(event)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after all that was enqueued on the caller's stream."""
        if self._copies is None:
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self.where).record_event()
        return event

    def mark_copies(self) -> torch.cuda.Event | None:
        """Return an event after all that was enqueued on the copying stream."""
        return None if self._copies is None else self._copies.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Block this thread until an event; nothing else of a diff does."""
        if event is not None:
            event.synchronize()

    def keep_for_copies(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that goes away until the copies that use it are done."""
        if self._copies is not None:
            tensor.record_stream(self._copies)

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return room for ``numel`` elements on the host, pinned for copies from the device."""
        return torch.empty(numel, dtype=dtype, pin_memory=self._copies is not None)

    def send(self, array: Tensor) -> Tensor:
        """Enqueue the copy of a small tensor on the host to the device, without waiting."""
        self.to_device_nbytes += array.nbytes
        if self._copies is None:
            return array
        # The allocator of pinned memory gives it out again when the copy is done.
        return array.pin_memory().to(self.where, non_blocking=True)

    def send_into(self, room: Tensor, bits: Tensor) -> None:
        """Enqueue the copy of pinned bits on the host into room on the device, without waiting."""
        self.to_device_nbytes += bits.nbytes
        room.copy_(bits, non_blocking=True)

    def receive(self, tensor: Tensor) -> Tensor:
        """Enqueue the copy of a tensor to pinned memory; it is there after the next wait."""
        self.to_host_nbytes += tensor.nbytes
        if self._copies is None:
            return tensor.clone()
        return (
            self.room(tensor.numel(), tensor.dtype)
            .view(tensor.shape)
            .copy_(tensor, non_blocking=True)
        )
