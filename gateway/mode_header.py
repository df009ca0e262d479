"""How calls name a mode: in a header, and an answer says in the same one where its prompt was computed."""

from collections.abc import Sequence
from typing import Final

from gateway.asgi import Scope
from gateway.errors import InvalidFieldError, excerpt
from gateway.modes import Mode

MODE_HEADER: Final = "x-kvsplice-mode"


def mode_named(value: str, param: str) -> Mode:
    """Raises InvalidFieldError about `param` for what is no mode."""
    try:
        return Mode(value.strip().lower())
    except ValueError:
        names = ", ".join(mode.value for mode in Mode)
        raise InvalidFieldError(f"{excerpt(value)!r} is no mode; there are {names}", param=param) from None


def asked_mode(scope: Scope) -> Mode | None:
    """The mode that a request asks for, None if it leaves that to the gateway. Raises InvalidFieldError."""
    values = [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == MODE_HEADER.encode()]
    return only_mode(values, MODE_HEADER)


def only_mode(values: Sequence[str], param: str) -> Mode | None:
    """The mode that `param` names, None if it was not sent. Raises InvalidFieldError, also if it was sent twice."""
    if len(values) > 1:
        raise InvalidFieldError(f"{param}: sent more than once; send one", param=param)
    return mode_named(values[0], param) if values else None


def mode_headers(mode: Mode | None) -> dict[str, str]:
    """What an answer says of the mode it was made in; nothing if that is not known."""
    return {} if mode is None else {MODE_HEADER: mode.value}
