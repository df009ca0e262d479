"""The `kvsplice` command. A role's code is imported when that role is asked for: the gateway runs without torch."""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import MappingProxyType
from typing import Final, NoReturn

from kvtransfer.command_line import exit_with, one_line_errors, parse
from kvtransfer.logs import configure_logging
from kvtransfer.signals import run_and_leave
from launcher.config import FetchConfig, HealthConfig, ServeConfig
from launcher.generate_config import GenerateConfig

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT

USAGE: Final = """\
usage: kvsplice COMMAND [FLAGS]

An LLM server that runs prefill and decode on different GPUs.

  serve         all roles on this machine: the quickest way to try it
  gateway       the HTTP face alone
  prefill       one worker that turns prompts into KV cache
  decode        one worker that takes KV cache, or computes it, and generates
  worker        one worker that is either, and switches its role when told to
  generate      a file of prompts to a file of results, in this process
  fetch-model   bring a model onto this machine
  keys          make the keys by which our processes know each other
  health        exit code 0 if a gateway is ready, or gives a worker requests, else 1
  flags         the flags of all commands as a table (Markdown)

kvsplice COMMAND --help explains a command; kvsplice --version names the release.
"""


def run() -> NoReturn:
    """The command `kvsplice`: `main`, and the end of the process."""
    run_and_leave(main)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; wrong settings end in SystemExit(2) after one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    if command in ("--help", "-h"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        print(f"kvsplice {version('kvsplice')}")
        return 0
    if command not in COMMANDS:
        what = f"unknown command {command[:64]!r}" if command else "a command is needed"
        print(f"kvsplice: error: {what} ({', '.join(COMMANDS)}; --help explains)", file=sys.stderr)
        return 2
    return COMMANDS[command](arguments[1:])


def _serve(argv: Sequence[str]) -> int:
    from launcher.serve import serve

    description = (
        "Starts a gateway, prefill workers and decode workers on this machine, says when they are ready, and restarts "
        "a process that dies (five times, with growing delays, then it gives up). Ctrl-C stops all of them within 5 s."
    )
    prog = "kvsplice serve"
    config = parse(ServeConfig, argv, os.environ, prog, description)
    with one_line_errors(prog), _interruptible():
        return serve(config, os.environ)


def _worker(argv: Sequence[str]) -> int:
    from launcher.worker import main as run_worker

    return run_worker(argv)


def _generate(argv: Sequence[str]) -> int:
    prog = "kvsplice generate"
    description = "Continues each prompt of a file. What the output holds already is not computed again."
    config = parse(GenerateConfig, argv, os.environ, prog, description)
    configure_logging(config.log_level)
    from engine.startup import failures_in_one_line
    from launcher.generate import generate

    with _interruptible(), failures_in_one_line(prog):
        try:
            return generate(config)
        except OSError as error:  # the disk is full, or nobody reads standard output any more
            exit_with(prog, error, 1)


def _fetch_model(argv: Sequence[str]) -> int:
    from launcher.default_model import resolve_model

    prog = "kvsplice fetch-model"
    config = parse(FetchConfig, argv, os.environ, prog, "Brings a model onto this machine and prints its folder.")
    with one_line_errors(prog), _interruptible():
        print(resolve_model(config.model))
    return 0


def _keys(argv: Sequence[str]) -> int:
    from launcher.keys import USAGE as KEYS_USAGE
    from launcher.keys import make_keys

    if {"--help", "-h"} & set(argv):
        print(KEYS_USAGE, end="")
        return 0
    with one_line_errors("kvsplice keys"):
        print(make_keys(argv), end="")
    return 0


def _health(argv: Sequence[str]) -> int:
    from launcher.health import ask

    prog = "kvsplice health"
    config = parse(HealthConfig, argv, os.environ, prog, "Asks a gateway for the cluster's or a worker's health.")
    healthy, reason = ask(config.url, config.worker_id)
    print(reason)
    return 0 if healthy else 1


def _flags(argv: Sequence[str]) -> int:
    from launcher.flags import USAGE as FLAGS_USAGE
    from launcher.flags import markdown_table

    if {"--help", "-h"} & set(argv):
        print(FLAGS_USAGE, end="")
        return 0
    if argv:
        print("kvsplice flags: error: takes no arguments", file=sys.stderr)
        return 2
    print(markdown_table(), end="")
    return 0


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lets SIGTERM and Ctrl-C unwind the block, so that a half-fetched model is cleaned up, and end it in one line."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print("kvsplice: interrupted", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _role(package: str) -> Callable[[Sequence[str]], int]:
    def run(argv: Sequence[str]) -> int:
        code: int = importlib.import_module(f"{package}.__main__").main(argv)
        return code

    return run


COMMANDS: Final[Mapping[str, Callable[[Sequence[str]], int]]] = MappingProxyType(
    {
        "serve": _serve,
        "gateway": _role("gateway"),
        "prefill": _role("prefill"),
        "decode": _role("decode"),
        "worker": _worker,
        "generate": _generate,
        "fetch-model": _fetch_model,
        "keys": _keys,
        "health": _health,
        "flags": _flags,
    }
)
