"""Every hostile object, by name."""

from __future__ import annotations

from typing import Final

from tests.hostile.case import Case
from tests.hostile.chains import chains
from tests.hostile.documents import documents
from tests.hostile.edges import edges
from tests.hostile.parts import parts

CORPUS: Final[tuple[Case, ...]] = (*parts(), *documents(), *edges(), *chains())
