"""Keys of the processes: CURVE encrypts every connection and proves who is at its ends.

    DIR/public/NAME.key             known to everybody; a socket lets in these keys and no others
    DIR/private/NAME.key_secret     known to its owner

A key may speak for the worker that is called as it is, and for those called `NAME-...`: one key `decode` serves all
decode workers, and a key `decode-1` of its own takes decode-1 out of its reach. The gateway's key is called `gateway`.
"""

import logging
import os
import re
import struct
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from kvtransfer.errors import IdentityError, SettingsError
from kvtransfer.link_name import speaks_for, worker_of

logger = logging.getLogger(__name__)

GATEWAY_KEY: Final = "gateway"
PUBLIC_FOLDER: Final = "public"
PRIVATE_FOLDER: Final = "private"
ZAP_DOMAIN: Final = b"kvsplice"
OVERHEAD_BYTES: Final = 33
"""What CURVE adds to a frame on the wire (RFC 26: command name, nonce, authenticator, flags); MAXMSGSIZE counts it."""

_KEY_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def check_key_name(flag: str, name: str) -> None:
    """Raises SettingsError unless `name` can be a key's: it is a part of file names and of log lines."""
    if not _KEY_NAME.fullmatch(name):
        raise SettingsError(f"{flag} takes a letter or digit and up to 63 letters, digits and _.-")


def public_path(folder: Path, name: str) -> Path:
    return folder / PUBLIC_FOLDER / f"{name}.key"


def private_path(folder: Path, name: str) -> Path:
    return folder / PRIVATE_FOLDER / f"{name}.key_secret"


@dataclass(frozen=True)
class CurveKeys:
    """One process's own pair, and everybody's public keys by name. Keys are in Z85: 40 printable bytes."""

    name: str
    public_key: bytes
    secret_key: bytes = field(repr=False)
    known: Mapping[str, bytes]

    @classmethod
    def load(cls, folder: Path, name: str) -> "CurveKeys":
        """Reads the pair called `name` and all public keys. Raises SettingsError, which says what to do."""
        known = _load_public_keys(folder)
        if name not in known:
            raise SettingsError(f"there is no {public_path(folder, name)}: make it with `kvsplice keys`")
        secret_key = _load_secret_key(private_path(folder, name))
        if zmq.curve_public(secret_key) != known[name]:
            raise SettingsError(f"{private_path(folder, name)} does not belong to {public_path(folder, name)}")
        return cls(name, known[name], secret_key, types.MappingProxyType(known))

    def owner_of(self, worker_id: str) -> str | None:
        """Name of the key that speaks for a worker: the longest that fits."""
        return max((name for name in self.known if speaks_for(name, worker_id)), key=len, default=None)

    def check_owns(self, worker_id: str) -> None:
        """Raises SettingsError unless this process may call itself `worker_id`."""
        owner = self.owner_of(worker_id)
        if owner == self.name:
            return
        hint = f"that of {owner} does" if owner else f"call it {self.name} or {self.name}-..."
        raise SettingsError(f"--worker-id={worker_id}: the key of {self.name} does not speak for it, {hint}")

    def public_key_of(self, worker_id: str) -> bytes:
        """The key by which to know a worker, or the gateway. Raises SettingsError if there is none."""
        owner = self.owner_of(worker_id)
        if owner is None:
            raise SettingsError(f"no public key speaks for {worker_id}: bring it into --curve-dir")
        return self.known[owner]

    def admitted(self, *but: str) -> dict[bytes, str]:
        """Names of the keys that a socket lets in, by their 32 bytes: all but those of the roles `but`."""
        return {
            z85.decode(key): name for name, key in self.known.items() if not any(speaks_for(role, name) for role in but)
        }

    def identity_fault(self, link: str, frame: zmq.Frame) -> IdentityError | None:
        """What is wrong with a message that came with a name: that its sender's key doesn't speak for that worker."""
        key_name = frame.get("User-Id")
        worker_id = worker_of(link)
        if key_name == self.owner_of(worker_id):
            return None
        return IdentityError(f"the key of {key_name} does not speak for worker {worker_id!r:.80}")


def load_keys(folder: str | None, name: str, worker_id: str | None = None) -> CurveKeys | None:
    """The keys in `folder` for the process whose own is `name`, and which calls itself `worker_id` if it is a worker.
    None if there is no folder. Raises SettingsError."""
    if folder is None:
        return None
    check_key_name("--curve-name", name)
    keys = CurveKeys.load(Path(folder), name)
    if worker_id is not None:
        keys.check_owns(worker_id)
    return keys


def write_pair(folder: Path, name: str) -> None:
    """Makes a pair; files that are there already are an error. Raises SettingsError."""
    public_key, secret_key = (key.decode() for key in zmq.curve_keypair())
    private, public = private_path(folder, name), public_path(folder, name)
    try:
        public.parent.mkdir(parents=True, exist_ok=True)
        private.parent.mkdir(mode=0o700, exist_ok=True)
        _write(private, 0o600, f'curve\n    public-key = "{public_key}"\n    secret-key = "{secret_key}"\n')
        _write(public, 0o644, f'curve\n    public-key = "{public_key}"\n')
    except OSError as error:
        raise SettingsError(f"cannot write {error.filename}: {error.strerror}") from error


def _write(path: Path, mode: int, text: str) -> None:
    """A new file, which nobody sees with another mode."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def be_server(socket: "zmq.Socket[Any]", keys: CurveKeys) -> None:
    """The socket takes encrypted connections alone, of keys that a `ZapHandler` of its context lets in."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # default: without a handler everybody is let in


def be_client(socket: "zmq.Socket[Any]", keys: CurveKeys, server_key: bytes) -> None:
    """The socket connects with our key, and to nobody but the owner of `server_key`."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public_key)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key)


def _load_public_keys(folder: Path) -> dict[str, bytes]:
    """All public keys of a folder, by name. One key under two names would not say who its owner is."""
    paths = sorted((folder / PUBLIC_FOLDER).glob("*.key"))
    if not paths:
        raise SettingsError(f"there are no keys in {folder / PUBLIC_FOLDER}: make them with `kvsplice keys`")
    names: dict[bytes, str] = {}
    for path in paths:
        check_key_name(f"{path}: the name of a key", path.stem)
        key, _ = _read(path)
        if key in names:
            raise SettingsError(f"{path} is the same key as that of {names[key]}: each name needs a pair of its own")
        names[key] = path.stem
    return {name: key for key, name in names.items()}


def _load_secret_key(path: Path) -> bytes:
    _, secret_key = _read(path)
    if secret_key is None:
        raise SettingsError(f"{path} has no secret key in it")
    if path.stat().st_mode & 0o077:
        logger.warning("%s can be read by others than its owner", path)
    return secret_key


def _read(path: Path) -> tuple[bytes, bytes | None]:
    """Public and secret key of a file."""
    try:
        if not path.is_file():
            raise FileNotFoundError
        keys = load_certificate(path)
        for key in keys:
            if key is not None and (len(key) != 40 or len(z85.decode(key)) != 32):
                raise ValueError("a key has 40 characters")
    except OSError as error:
        raise SettingsError(f"cannot read the key {path}: {error.strerror or 'no such file'}") from error
    except (ValueError, KeyError, struct.error) as error:  # no key in it, or one that is no Z85
        raise SettingsError(f"{path} is no file of a CURVE key") from error
    return keys
