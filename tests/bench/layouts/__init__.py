"""Updates in the layouts of other systems, both ways, to compare sizes and speeds.

Each module is written from a description of the layout and contains no code of the other system.
Its docstrings name the described code. Undescribed parts and checksums are omitted and documented,
which favours the other system. ``tests/unit/bench/test_layouts.py`` compares the sizes with those
that the systems' own code writes.
"""
