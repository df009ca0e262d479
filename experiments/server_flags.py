"""Flags of the programs that measure an OpenAI-compatible server from outside."""

import argparse
import os
from collections.abc import Sequence


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Which server, as whom, and how to ask it."""
    parser.add_argument("--url", required=True, help="of the server, without /v1")
    add_caller_flags(parser)
    parser.add_argument("--plain", action="store_true", help="do not send ignore_eos, which OpenAI's own API refuses")


def add_caller_flags(parser: argparse.ArgumentParser) -> None:
    """For which model, and as whom."""
    parser.add_argument("--model", help="name in requests; the server's first model if not given")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="or $OPENAI_API_KEY")


def require_positive(parser: argparse.ArgumentParser, options: argparse.Namespace, names: Sequence[str]) -> None:
    """Ends the program with one line unless all of these options are above 0."""
    for name in names:
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
