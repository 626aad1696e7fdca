"""Asynchronous GRPO over a bucket: a trainer here, a real engine there, a game between them."""

import os

# TRL warns whoever imports its asynchronous trainer that it may change; people who watch a demo can
# do nothing about that.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
