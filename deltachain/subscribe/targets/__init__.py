"""What a subscriber writes into: tensors, or a checkpoint folder."""
