"""All layouts of other systems, by name, in the order of tables."""

from __future__ import annotations

from typing import Final

from tests.bench.layouts.checkpoint_bytes import (
    MODELEXPRESS_XOR,
    SKYRL_XOR,
    SLIME_OVERWRITE,
    SLIME_XOR,
)
from tests.bench.layouts.layout import PeerLayout
from tests.bench.layouts.nemo_rl import NEMO_XOR
from tests.bench.layouts.pulse import PULSE
from tests.bench.layouts.slime_gaps import SLIME_DELTAS, SLIME_DELTAS_ZSTD
from tests.bench.layouts.trl import TRL_GAPS, TRL_V1

LAYOUTS: Final[dict[str, PeerLayout]] = {
    layout.name: layout
    for layout in (
        TRL_V1,
        TRL_GAPS,
        SLIME_XOR,
        SLIME_OVERWRITE,
        SKYRL_XOR,
        SLIME_DELTAS,
        SLIME_DELTAS_ZSTD,
        NEMO_XOR,
        PULSE,
        MODELEXPRESS_XOR,
    )
}
