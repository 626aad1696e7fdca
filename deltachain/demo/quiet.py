"""Keeps the demo from being drowned: by what other libraries say, and by its own other process.

Progress bars and advice of the training libraries would bury the few lines that the demo prints,
and a warning that one of them gives about another is nothing that its reader could act on. And
trainer and follower share one machine: threads of a matrix product wait for each other busily, so
that a process with as many threads as cores becomes several times slower when anything else runs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import datasets
import torch
from transformers.utils import logging as transformers_logging

_OTHERS: Final = r"(accelerate|datasets|torch|transformers|trl)\b"
_MOST_THREADS: Final = 4


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence the training libraries' bars, logs below errors, and warnings; then restore them."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    had_dataset_bars = not datasets.are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=_OTHERS)
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
        if had_dataset_bars:
            datasets.enable_progress_bars()


@contextmanager
def spare_one_core() -> Iterator[None]:
    """Let torch compute on all cores but one, and on no more than a small model can use."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(_MOST_THREADS, (os.cpu_count() or 1) - 1)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
