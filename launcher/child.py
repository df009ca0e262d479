"""A role as a child of the launcher: `python -m launcher.child ROLE FLAGS...`, which dies with its parent."""

import sys
from collections.abc import Sequence

from kvtransfer.signals import run_and_leave
from launcher.cli import main as run_command
from launcher.lifeline import die_with_launcher


def main(argv: Sequence[str]) -> int:
    """Runs the role; returns its exit code."""
    die_with_launcher()
    return run_command(argv)


if __name__ == "__main__":
    run_and_leave(lambda: main(sys.argv[1:]))
