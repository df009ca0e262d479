"""How the queue of a worker's requests is kept, whichever role it has."""

from dataclasses import dataclass


@dataclass(frozen=True)
class QueueRules:
    """Requests that may wait; whether blocks are shared by what they hold; whether `priority` goes before arrival."""

    max_waiting: int
    share_prefixes: bool = True
    by_priority: bool = False
