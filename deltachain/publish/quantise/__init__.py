"""Quantisation on the trainer's side: the chain carries a quantised checkpoint of the weights.

To add a recipe in a package of your own, register a :class:`Recipe` in the entry point group
``deltachain.recipes``; see CONTRIBUTING.md.
"""

from deltachain.publish.quantise.recipe import (
    Arithmetic,
    Codes,
    Margins,
    Multipliers,
    Recipe,
    Scales,
    Stored,
)

__all__ = ["Arithmetic", "Codes", "Margins", "Multipliers", "Recipe", "Scales", "Stored"]
