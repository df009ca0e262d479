"""`python -m launcher`: the same as the `kvsplice` command."""

from launcher.cli import run

run()
