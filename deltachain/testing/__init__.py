"""Contract suites of stores, for built-in and third-party ones; they need pytest."""
