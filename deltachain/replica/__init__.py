"""The ranks of an inference engine, and the leader that updates them as one."""
