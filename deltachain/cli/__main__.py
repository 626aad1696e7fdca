"""``python -m deltachain.cli``."""

from deltachain.cli import main

main()
