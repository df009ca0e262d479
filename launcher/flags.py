"""The table of all flags, for the README."""

from typing import Final

from decode.config import DecodeConfig
from gateway.config import GatewayConfig
from kvtransfer.settings import Option, Settings, options
from launcher.config import ServeConfig
from launcher.generate_config import GenerateConfig
from launcher.worker_config import WorkerConfig
from prefill.config import PrefillConfig

USAGE: Final = """\
usage: kvsplice flags

Prints the flags of all commands as a table (Markdown): which command has it, its default and its meaning.
"""
COMMANDS: Final[tuple[tuple[str, type[Settings]], ...]] = (
    ("serve", ServeConfig),
    ("gateway", GatewayConfig),
    ("prefill", PrefillConfig),
    ("decode", DecodeConfig),
    ("worker", WorkerConfig),
    ("generate", GenerateConfig),
)


def markdown_table() -> str:
    """One row a flag, in the order of first appearance; the help is that of the first command which has it."""
    rows: dict[str, tuple[Option, list[str]]] = {}
    for command, config_class in COMMANDS:
        for option in options(config_class):
            rows.setdefault(option.flag, (option, []))[1].append(command)
    lines = ["| flag | commands | default | meaning |", "|---|---|---|---|"]
    lines += [_row(option, commands) for option, commands in rows.values()]
    return "\n".join(lines) + "\n"


def _row(option: Option, commands: list[str]) -> str:
    choices = f" ({', '.join(option.about.choices)})" if option.about.choices else ""
    return f"| `{option.flag}` | {', '.join(commands)} | {option.default_text} | {option.about.help}{choices} |"
