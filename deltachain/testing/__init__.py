"""Contract suites, fault injection and emulated servers for tests of deltachain and its users.

Import the modules directly: some need pytest, which deltachain does not depend on.
"""
