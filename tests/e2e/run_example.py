"""``python run_example.py EXAMPLE [PACKAGES ...]``: an example as its user runs it, on a CPU."""

import runpy
import sys


def main() -> None:
    example, *packages = sys.argv[1:]
    sys.path += packages
    if "async" in example:
        from examples.demo.online.cpu import run_on_cpu  # noqa: PLC0415 - takes seconds

        run_on_cpu()
    sys.argv = [example]
    runpy.run_path(example, run_name="__main__")


if __name__ == "__main__":
    main()
