"""Setup of the demo's processes: quiet training libraries, and a limit of torch threads.

Progress bars and warnings of the training libraries would hide the output of the demo. Trainer and
follower share one machine: threads of a matrix product spin while they wait for each other, so that
a process with as many threads as cores becomes several times slower when another process runs.
"""

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
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(_MOST_THREADS, (os.cpu_count() or 1) - 1)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
