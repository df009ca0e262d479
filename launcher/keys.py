"""`kvsplice keys`: makes key pairs, and says what belongs where."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtransfer.curve import GATEWAY_KEY, PUBLIC_FOLDER, check_key_name, private_path, public_path, write_pair
from kvtransfer.errors import SettingsError

DEFAULT_NAMES: Final = (GATEWAY_KEY, "prefill", "decode", "worker")

USAGE: Final = """\
usage: kvsplice keys DIR [NAME ...]

Makes a CURVE key pair for each NAME (default: gateway prefill decode worker) in DIR/public and DIR/private. What is
there already is never overwritten. A worker takes the key that is called as its role, or worker if it can switch that,
or as --curve-name says, and its worker id must be that name or begin with it and a dash. The gateway's key is called
gateway.
"""


def make_keys(arguments: Sequence[str]) -> str:
    """Makes the pairs that the command line asks for; returns what to tell the operator. Raises SettingsError."""
    if not arguments or any(word.startswith("-") for word in arguments):
        raise SettingsError("takes a folder and names: DIR [NAME ...] (--help explains)")
    folder, names = Path(arguments[0]), tuple(dict.fromkeys(arguments[1:])) or DEFAULT_NAMES
    for name in names:
        check_key_name("NAME", name)
        for path in (public_path(folder, name), private_path(folder, name)):
            if path.exists():
                raise SettingsError(f"{path} is there already; nothing was made")
    for name in names:
        write_pair(folder, name)
    return _what_belongs_where(folder, names)


def _what_belongs_where(folder: Path, names: Sequence[str]) -> str:
    width = max(len(name) for name in ("everybody", *names))
    lines = [f"{'everybody':{width}}  {folder / PUBLIC_FOLDER}"]
    lines += [f"{name:{width}}  {private_path(folder, name)}" for name in names]
    lines += [
        "",
        "Give each node all public keys, and of the private ones those of the processes that run there, no others.",
        "Then start each process with --curve-dir, or KVSPLICE_CURVE_DIR.",
    ]
    return "\n".join(lines) + "\n"
