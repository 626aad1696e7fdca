"""Contract suites and twins for testing what is built on deltachain, and deltachain itself.

Nothing is imported here: some of these modules need pytest, which deltachain does not depend on.
"""
