"""A role as a child of the launcher: `python -m launcher.child ROLE FLAGS...`, which dies with its parent.

The launcher holds the other end of this process's stdin and never writes to it. The end of that pipe means that the
launcher is gone, however it went; then there is nobody to serve for.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence

from launcher.cli import main as run_command

STDIN = 0


def main(argv: Sequence[str]) -> int:
    threading.Thread(target=_die_with_launcher, name="lifeline", daemon=True).start()
    return run_command(argv)


def _die_with_launcher() -> None:
    while os.read(STDIN, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
