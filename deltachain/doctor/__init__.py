"""Diagnosis: whether a publisher or a follower with this environment would work, and why not."""
