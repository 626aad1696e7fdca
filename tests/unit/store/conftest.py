from __future__ import annotations

import pytest

pytest.register_assert_rewrite("deltachain.testing.races", "deltachain.testing.store")
