"""Asynchronous GRPO over a bucket: a trainer here, a real engine there, a game between them."""
