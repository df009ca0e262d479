"""One way to say what can be set, for every role: a frozen dataclass, whose fields are flags and environment variables.

    @dataclass(frozen=True, kw_only=True)
    class ServerConfig(Settings):
        port: int = setting(8000, "Port to listen on.", ge=0, le=65535)

A field `max_model_len` is the flag `--max-model-len` and the variable `KVSPLICE_MAX_MODEL_LEN`. From these to a config:
`kvtransfer/command_line.py`.
"""

import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeVar

from kvtransfer.errors import SettingsError
from kvtransfer.variables import ENV_PREFIX

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})

_T = TypeVar("_T")


@dataclass(frozen=True)
class Setting:
    """What a field's type and default do not say. `ge` and `le` bound numbers, both inclusive."""

    help: str
    group: str
    flag: str | None  # where the flag is not the field's name
    choices: tuple[str, ...]
    ge: float | None
    le: float | None
    metavar: str | None
    default_text: str | None  # what the help says instead of the default


def setting(
    default: _T,
    help: str,
    *,
    group: str = "options",
    flag: str | None = None,
    choices: Sequence[str] = (),
    ge: float | None = None,
    le: float | None = None,
    metavar: str | None = None,
    default_text: str | None = None,
    secret: bool = False,
) -> _T:
    """A dataclass field that is also a flag and an environment variable. A secret one stays out of `repr`."""
    about = Setting(help, group, flag, tuple(choices), ge, le, metavar, default_text)
    made: _T = field(default=default, repr=not secret, metadata={"setting": about})
    return made


def like(config_class: "type[Settings]", name: str, *, group: str | None = None) -> Any:
    """A setting that another config has too, taken from there: its default, bounds and help, under `group` if given."""
    (twin,) = (entry for entry in fields(config_class) if entry.name == name)
    about = twin.metadata["setting"]
    about = about if group is None else replace(about, group=group)
    return field(default=twin.default, repr=twin.repr, metadata={"setting": about})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of the roles' configs: checks choices and bounds when made. Subclasses add contradictions to
    `__post_init__`, and raise SettingsError."""

    def __post_init__(self) -> None:
        for option in options(type(self)):
            option.check(getattr(self, option.name))


@dataclass(frozen=True, kw_only=True)
class ProcessSettings(Settings):
    """What programs have alike that know nothing of each other, taken from here one by one with `like`: where a setting
    stands among the others is each config's own."""

    default_seed: int | None = setting(
        None,
        "Seed of requests that bring none.",
        group="model",
        flag="seed",
        ge=-(1 << 63),
        le=(1 << 63) - 1,
        default_text="drawn for each request",
    )
    enforce_eager: bool = setting(
        False,
        "On a GPU: launch each kernel of a decode step by itself instead of replaying CUDA graphs.",
        group="device",
    )
    curve_dir: str | None = setting(
        None,
        "Folder with the keys of our processes, made by `kvsplice keys`: all connections between them are encrypted, "
        "and take known keys alone.",
        group="network",
        metavar="DIR",
        default_text="no keys, connections in clear",
    )
    insecure: bool = setting(
        False,
        "Allow sockets without keys on addresses that other machines can reach: whoever reaches them is taken at his "
        "word, and all is sent in clear.",
        group="network",
    )
    log_level: str = setting("info", "How much to log.", group="process", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True)
class Option:
    """One field of a config, as flag and environment variable."""

    name: str
    kind: type  # bool, int, float, str or tuple (of str)
    optional: bool  # None is allowed
    default: Any
    about: Setting

    @property
    def flag(self) -> str:
        return "--" + (self.about.flag or self.name).replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.flag[2:].replace("-", "_").upper()

    @property
    def label(self) -> str:
        """How messages name this option."""
        return f"{self.flag} ({self.variable})"

    @property
    def default_text(self) -> str:
        if self.about.default_text is not None:
            return self.about.default_text
        if self.kind is bool:
            return "on" if self.default else "off"
        if self.kind is tuple:
            return ",".join(self.default) or "none"
        return "none" if self.default is None else str(self.default)

    def convert(self, text: str) -> Any:
        """The value that `text` stands for. Raises SettingsError."""
        if self.kind is tuple:
            return tuple(part.strip() for part in text.split(","))
        if self.kind is bool:
            return self._convert_bool(text)
        try:
            return self.kind(text)
        except ValueError:
            wanted = "a whole number" if self.kind is int else "a number"
            raise SettingsError(f"{self.label} must be {wanted}, not {quoted(text)}") from None

    def _convert_bool(self, text: str) -> bool:
        word = text.strip().lower()
        if word not in _TRUE | _FALSE:
            raise SettingsError(f"{self.label} must be true or false, not {quoted(text)}")
        return word in _TRUE

    def check(self, value: Any) -> None:
        """Raises SettingsError if `value` is outside of choices and bounds."""
        if value is None and self.optional:
            return
        if value == "" or (self.kind is tuple and "" in value):
            raise SettingsError(f"{self.label} must not be empty")
        about = self.about
        if about.choices and value not in about.choices:
            raise SettingsError(f"{self.label} must be one of {', '.join(about.choices)}, not {quoted(str(value))}")
        if self.kind is float and not math.isfinite(value):
            raise SettingsError(f"{self.label} must be finite, not {value}")
        if about.ge is not None and value < about.ge:
            raise SettingsError(f"{self.label} must be at least {about.ge}, not {value}")
        if about.le is not None and value > about.le:
            raise SettingsError(f"{self.label} must be at most {about.le}, not {value}")


def options(config_class: type[Settings]) -> list[Option]:
    """All options of a config class, inherited ones first."""
    hints = typing.get_type_hints(config_class)
    return [_option(entry.name, hints[entry.name], entry.default, entry.metadata) for entry in fields(config_class)]


def to_flags(config_class: type[Settings], values: Mapping[str, Any]) -> list[str]:
    """The command line that gives `config_class` these values, by field name; None and empty tuples are left out."""
    argv: list[str] = []
    for option in options(config_class):
        value = values.get(option.name)
        if value is None or value == ():
            continue
        if option.kind is bool:
            argv.append(option.flag if value else "--no-" + option.flag[2:])
        else:
            argv.append(f"{option.flag}={','.join(value) if option.kind is tuple else value}")
    return argv


def _option(name: str, hint: Any, default: Any, metadata: Mapping[str, Any]) -> Option:
    about = metadata.get("setting")
    assert isinstance(about, Setting), f"field {name} is not made with setting()"
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [member for member in members if member is not types.NoneType]
    kind = typing.get_origin(kinds[0]) or kinds[0]
    assert kind in (bool, int, float, str, tuple), f"field {name}: no flag for {hint}"
    return Option(name, kind, types.NoneType in members, default, about)


def quoted(text: str) -> str:
    """`text` as a short printable literal."""
    return repr(text if len(text) <= 64 else text[:61] + "...")
