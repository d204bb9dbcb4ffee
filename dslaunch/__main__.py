"""`dslaunch` and `python -m dslaunch`."""

from __future__ import annotations

import gc
import io
import sys


def main() -> None:
    """Run the command line and leave with its exit status."""
    gc.set_threshold(100_000, 50, 100)  # a search makes many small values, none of which are cycles
    try:
        from dslaunch.cli import run
    except KeyboardInterrupt:
        print("dslaunch: stopped", file=sys.stderr)
        sys.exit(130)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's text may hold what the terminal can't print
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
