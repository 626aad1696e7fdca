"""All layouts of other systems, by name, in the order of tables."""

from __future__ import annotations

from typing import Final

from deltachain.bench.layouts.checkpoint_bytes import (
    MODELEXPRESS_XOR,
    SKYRL_XOR,
    SLIME_OVERWRITE,
    SLIME_XOR,
)
from deltachain.bench.layouts.layout import PeerLayout
from deltachain.bench.layouts.nemo_rl import NEMO_XOR
from deltachain.bench.layouts.pulse import PULSE
from deltachain.bench.layouts.slime_gaps import SLIME_DELTAS, SLIME_DELTAS_ZSTD
from deltachain.bench.layouts.trl import TRL_GAPS, TRL_V1

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
