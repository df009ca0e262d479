"""Where a prompt is computed: the modes of a request, and the rule of `auto`. Knows no socket, clock or worker.

    disaggregated   prefill computes the prompt and ships its KV; decode goes on from there
    local           decode computes the prompt too, in chunks beside its running requests
    auto            local if what decode has to compute is short, or if there is no prefill worker; else disaggregated

A short prompt, or the new end of a chat whose beginning decode has still in its pool, hardly disturbs the streams
there, and its KV need not travel. A long one would keep all of them waiting.
"""

from dataclasses import dataclass
from enum import Enum

from kvtransfer.errors import SettingsError
from kvtransfer.worker_facts import Role


class Mode(Enum):
    """Where a prompt is computed. The value is that of the header."""

    AUTO = "auto"  # as the rules say, and as workers are there
    DISAGGREGATED = "disaggregated"
    LOCAL = "local"

    @property
    def needs(self) -> tuple[Role, ...]:
        """The roles that must be there for a request of this mode."""
        return tuple(Role) if self is Mode.DISAGGREGATED else (Role.DECODE,)


@dataclass(frozen=True)
class ModeRules:
    """`default`: the mode of requests that ask for none. `local_threshold`: tokens that decode may have to compute of a
    prompt that is local in auto mode; 0: none is, while there is a prefill worker."""

    default: Mode = Mode.AUTO
    local_threshold: int = 64

    def __post_init__(self) -> None:
        if self.local_threshold < 0:
            raise SettingsError(f"local_threshold can't be negative: {self.local_threshold}")

    def prefers_local(self, num_tokens: int, num_held: int) -> bool:
        """`num_held` of the `num_tokens` to compute are in decode's pool already, as far as we know."""
        return self.local_threshold > 0 and num_tokens - num_held <= self.local_threshold
