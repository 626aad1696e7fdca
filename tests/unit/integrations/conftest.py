import examples.demo.online  # noqa: F401 - silences a warning of TRL, which tests would fail of
