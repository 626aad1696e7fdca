"""Public list prices of object stores, for estimates.

Dollars without taxes, discounts and free allowances, at the first step of each scale. Sources:
aws.amazon.com/s3/pricing (us-east-1, Standard), developers.cloudflare.com/r2/pricing (Standard),
huggingface.co/docs/hub/storage-limits (private storage above what a plan includes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GB: Final = 1e9
"""Bytes of a gigabyte, as prices count it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of one provider, in dollars.

    Attributes:
        provider: Its name.
        gb_month: Storage of one GB for a month.
        write: One request that writes or lists.
        read: One request that reads.
        gb_out: One GB that leaves the provider for the internet.
    """

    provider: str
    gb_month: float
    write: float
    read: float
    gb_out: float

    def storage(self, nbytes: int) -> float:
        """Return the price of keeping bytes for a month."""
        return nbytes / GB * self.gb_month

    def writing(self, objects: int) -> float:
        """Return the price of putting objects; bytes that enter a store are free."""
        return objects * self.write

    def reading(self, nbytes: int, objects: int) -> float:
        """Return the price of getting objects from outside the provider."""
        return nbytes / GB * self.gb_out + objects * self.read


LIST_PRICES: Final = (
    Prices(provider="S3", gb_month=0.023, write=5e-6, read=4e-7, gb_out=0.09),
    Prices(provider="R2", gb_month=0.015, write=4.5e-6, read=3.6e-7, gb_out=0.0),
    Prices(provider="HF", gb_month=0.025, write=0.0, read=0.0, gb_out=0.0),
)
