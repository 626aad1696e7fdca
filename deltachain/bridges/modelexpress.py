"""ModelExpress: ``v7/`` is a checkpoint, or frames of what changed since ``v6``.

Receivers learn of a version from a catalogue: make it READY there once its index is written.
Source: ModelExpress 008f0da (``modelexpress_rl/train/methods/canonical_delta.py``), and its
docs/S3_DELTA_WEIGHT_REFIT.md.
"""

from typing import Final

from deltachain.bridges.slime import IndexedDialect

MODELEXPRESS: Final = IndexedDialect("v{}", "v{}", "adler32")
