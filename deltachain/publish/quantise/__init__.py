"""Quantisation on the trainer's side: the chain carries a quantised checkpoint of the weights."""
