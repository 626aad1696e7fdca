"""Packages of one module, as an installer leaves them."""

from pathlib import Path


def write_package(
    site: Path, name: str, *, version: str = "1.0", source: str = "", entry_points: str = ""
) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    if source:
        (site / f"{name}.py").write_text(source)
