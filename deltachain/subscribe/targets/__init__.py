"""Targets of a subscriber: tensors, or a checkpoint folder."""
