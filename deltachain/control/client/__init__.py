"""Clients of the control plane: one replica, or a fleet of them."""
