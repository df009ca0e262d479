"""A role as a child of the launcher: `python -m launcher.child ROLE FLAGS...`, which dies with its parent."""

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from launcher.cli import main as run_command
from launcher.lifeline import die_with_launcher


def main(argv: Sequence[str]) -> NoReturn:
    """Runs the role and ends the process with its exit code."""
    die_with_launcher()
    try:
        code = run_command(argv)
    except SystemExit as ended:
        code = _code_of(ended)
    _exit_at_once(code)


def _code_of(ended: SystemExit) -> int:
    assert isinstance(ended.code, int), f"a role ended with {ended.code!r}"
    return ended.code


def _exit_at_once(code: int) -> NoReturn:
    """Ends the process without the interpreter's clean-up: that of torch alone takes most of a second, and all that is
    ours has been closed by now."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
