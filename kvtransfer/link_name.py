"""How a worker names its connections: `worker_id/generation/nonce`, a ZeroMQ routing id. No socket, no clock.

A ROUTER gives a route to whoever names it last. So the name of a start of a worker is its own: another process with
the same worker id has another generation, and cannot take over the replies meant for the first. A nonce that only the
two ends of a connection know keeps everybody else from it too, who learns generations from requests that name them.
"""

import secrets


def new_link_name(worker_id: str, generation: str) -> str:
    """A name that nobody else can guess."""
    return f"{worker_id}/{generation}/{secrets.token_hex(8)}"


def worker_of(link: str) -> str:
    """The worker id that a name claims."""
    return link.partition("/")[0]


def is_of(link: str, worker_id: str, generation: str) -> bool:
    """Whether a name is that of this start of this worker; worker ids and generations have no slash."""
    return link.split("/")[:2] == [worker_id, generation]


def speaks_for(name: str, worker_id: str) -> bool:
    """Whether `name`, of a key or of a role, may stand for this worker: for the one called so and for `name-...`."""
    return worker_id == name or worker_id.startswith(f"{name}-")
