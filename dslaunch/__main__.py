"""`dslaunch` and `python -m dslaunch`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and leave with its exit status."""
    from dslaunch.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
