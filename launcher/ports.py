"""Listening addresses of this machine."""

import socket

from kvtransfer.addresses import is_wildcard
from launcher.errors import PortUnavailableError


def usable_port(host: str, port: int) -> int:
    """`port`, or a free one for 0, after a try to bind it. Raises PortUnavailableError.

    The port is free again on return, so a quick other process may still take it: then whoever binds it says so.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            bound: int = probe.getsockname()[1]
            return bound
    except OSError as error:
        raise PortUnavailableError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another with --host and --port"
        ) from error


def dial_host(host: str) -> str:
    """Where a client on this machine reaches a server that is bound to `host`."""
    if not is_wildcard(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"
