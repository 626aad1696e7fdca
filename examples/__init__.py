"""Deployments to run and to read; a package, so that no other of this name is found first."""
