"""Asynchronous GRPO over a bucket: a trainer, an inference engine and a game environment."""

import os

# Hides TRL's import warning that its asynchronous trainer may change.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
