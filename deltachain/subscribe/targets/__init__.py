"""Targets of subscribers: tensors, or a checkpoint folder."""
