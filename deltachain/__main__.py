"""``python -m deltachain``."""

from deltachain.cli import main

main()
