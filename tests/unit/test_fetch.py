from __future__ import annotations

import pytest

from deltachain.errors import ConfigError
from deltachain.fetch import open_base
from deltachain.manifest import BaseRef


@pytest.mark.parametrize("path", ["a" * 5000, "/not/there", "a\0b", "/dev/null", "/dev/zero"])
def test_a_base_at_a_path_that_can_not_be_is_refused(path: str) -> None:
    # The path is the publisher's: whatever it is, here it is a folder of weights or none.
    with pytest.raises(ConfigError, match=r"base checkpoint|no safetensors"):
        open_base(BaseRef(path=path), None)
