"""Rules for the addresses that an operator gives: which are loopback, which can be dialled, how they are written."""

import ipaddress
import re

from kvtransfer.errors import SettingsError

_ENDPOINT = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})")
_HOST = re.compile(r"[A-Za-z0-9_.:-]{1,253}")


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from this machine. A name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether `host` means all interfaces: good for binding, not for dialling."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"


def endpoint(host: str, port: int | str) -> str:
    """The ZeroMQ address of (host, port; "*" is any free one); an IPv6 address goes into brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def check_host(flag: str, host: str) -> None:
    """Raises SettingsError unless `host` looks like a host name or an IP address."""
    if not _HOST.fullmatch(host):
        raise SettingsError(f"{flag} must be a host name or an IP address, without scheme or port")


def check_private_bind(flag: str, host: str, curve_dir: str | None, insecure: bool) -> None:
    """Raises SettingsError if a socket between our processes would be open to other machines without keys or consent,
    and if both are given."""
    check_host(flag, host)
    if insecure and curve_dir is not None:
        raise SettingsError("--insecure is for sockets without keys, and --curve-dir gives them keys: say one of them")
    if not insecure and curve_dir is None and not is_loopback(host):
        raise SettingsError(
            f"{flag}={host} can be reached from other machines, and without keys this socket takes anybody: give it "
            "keys by --curve-dir (`kvsplice keys` makes them), or bind it to a private network and say --insecure"
        )


def check_endpoint(flag: str, address: str) -> None:
    """Raises SettingsError unless `address` is tcp://HOST:PORT that can be dialled."""
    match = _ENDPOINT.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65535 or is_wildcard(match["host"].strip("[]")):
        raise SettingsError(f"{flag} must be tcp://HOST:PORT with a host that can be dialled")
