"""From a command line and environment variables to a config, alike for every role.

    config = parse(ServerConfig, sys.argv[1:], os.environ, "kvsplice server", "Serves.")

A flag beats a variable, a variable beats the default. Whatever is wrong ends in one line on stderr and exit code 2.
"""

import argparse
import difflib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeVar

from kvtransfer.errors import SettingsError
from kvtransfer.settings import Option, Settings, options, quoted
from kvtransfer.variables import ENV_PREFIX, KNOWN_VARIABLES

_METAVARS: Final[Mapping[type, str]] = types.MappingProxyType({int: "N", float: "X", str: "TEXT", tuple: "TEXT[,TEXT]"})
_Config = TypeVar("_Config", bound=Settings)


def parse(
    config_class: type[_Config], argv: Sequence[str], environ: Mapping[str, str], prog: str, description: str
) -> _Config:
    """The config that flags and environment ask for. On `--help` exits with 0; on anything wrong prints one line
    `PROG: error: ...` to stderr and exits with 2."""
    table = options(config_class)
    parser = _parser(table, prog, description)
    with one_line_errors(prog):
        given = vars(parser.parse_args(list(argv)))
        refuse_unknown_variables(environ)
        values = _values_from(environ, table) | {
            option.name: _flag_value(option, given[option.name]) for option in table if option.name in given
        }
        return config_class(**values)


@contextmanager
def one_line_errors(prog: str) -> Iterator[None]:
    """Turns a SettingsError inside the block into one line on stderr and exit code 2."""
    try:
        yield
    except SettingsError as error:
        exit_with(prog, error, 2)


def exit_with(prog: str, error: Exception, code: int) -> NoReturn:
    """Ends the process with one line `PROG: error: ...` on stderr."""
    line = " ".join(str(error).split())
    sys.stderr.write(f"{prog}: error: {line}\n")
    raise SystemExit(code) from None


def refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """Raises SettingsError for a KVSPLICE_* variable that no role knows, or one that is set to nothing."""
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX):
            continue
        if name not in KNOWN_VARIABLES:
            close = difflib.get_close_matches(name, sorted(KNOWN_VARIABLES), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SettingsError(f"unknown environment variable {quoted(name)}{hint}")
        if not environ[name].strip():
            raise SettingsError(f"{name} is set to nothing; unset it to get the default")


class _OneLineParser(argparse.ArgumentParser):
    """argparse that leaves the error line to `one_line_errors`."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message} (--help lists all flags)")


def _parser(table: Sequence[Option], prog: str, description: str) -> _OneLineParser:
    parser = _OneLineParser(
        prog=prog,
        description=description,
        epilog="A flag beats its environment variable, and the variable beats the default.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    titles = dict.fromkeys(option.about.group for option in table)
    groups = {title: parser.add_argument_group(title) for title in titles}
    for option in table:
        _add(groups[option.about.group], option)
    return parser


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    about = option.about
    text = f"{about.help} [default: {option.default_text}] [env: {option.variable}]".replace("%", "%%")
    if option.kind is bool:
        group.add_argument(option.flag, dest=option.name, action=argparse.BooleanOptionalAction, help=text)
        return
    metavar = about.metavar or ("{" + ",".join(about.choices) + "}" if about.choices else _METAVARS[option.kind])
    action = "append" if option.kind is tuple else "store"
    group.add_argument(option.flag, dest=option.name, action=action, metavar=metavar, help=text)


def _flag_value(option: Option, given: Any) -> Any:
    """argparse's value of a flag: bool, text, or (for tuples) a list of texts."""
    if option.kind is bool:
        return given
    return option.convert(",".join(given) if option.kind is tuple else given)


def _values_from(environ: Mapping[str, str], table: Sequence[Option]) -> dict[str, Any]:
    return {option.name: option.convert(environ[option.variable]) for option in table if option.variable in environ}
