"""The protocol between workers and gateways. That of the KV hand-over is `kvtransfer/kv_messages.py`; how both are
encoded is in `kvtransfer/codec.py`.

    worker  -> gateway   Hello, Heartbeat, StepOutput, Goodbye
    gateway -> worker    Welcome, Refused, Reintroduce, GatewayBeat, PrefillRequest, DecodeRequest, Cancel,
                         ResetPrefixCache, SwitchRole

Every hand-over is named by (request_id, attempt); whatever names an attempt that is over is dropped. Several choices of
a prompt have one hand-over, named by the first of them; else each is a request like any other.

A link that is cut and comes back may have lost messages without a word. So from Welcome on the messages that matter are
numbered 1, 2, ... in each direction (StepOutput; PrefillRequest, DecodeRequest, Cancel, ResetPrefixCache and SwitchRole
together), and the beats name the last number sent. Whoever misses a number gives the link up, and it begins anew with
the next Hello and its Welcome.
"""

from typing import Annotated, Final

import msgspec

from kvtransfer.codec import Attempt, Count, Decoder, Endpoint, Message, Name, Part, Positive, Text
from kvtransfer.request_parts import MAX_STOP_TOKEN_IDS, RequestOutput, RequestSpec, Siblings, TokenId
from kvtransfer.worker_facts import Fingerprint, KvLayout, LeaveCause, Limits, Load, Role

MAX_DRAIN_S = 3600.0
"""Longest time that a worker may be given to end what it runs, seconds."""


# --- worker -> gateway -----------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """A worker introduces itself. `generation` is drawn anew at each start, so a restarted worker is another one; and
    so is one that has switched its role, which it does when told to if it says `can_switch`.
    `kv_endpoint` is where a decode worker takes KV (None for prefill). `introduction` counts how often this start has
    registered with this gateway: a Hello that is repeated for want of an answer keeps it, one after a loss moves it.
    `shares_prefixes`: whether it keeps the KV of prompts for later ones that begin alike. `eos_token_ids`: with which
    the model ends an output, unless a request ignores them."""

    protocol: Positive
    role: Role
    worker_id: Name
    generation: Name
    fingerprint: Fingerprint
    layout: KvLayout
    limits: Limits
    kv_endpoint: Endpoint | None
    introduction: Positive = 1
    shares_prefixes: bool = True
    can_switch: bool = False
    eos_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()


class Heartbeat(Message, frozen=True):
    """Sent by the control thread at a fixed rate. `progress` counts engine steps and idle wake-ups: while it stands
    still for long, the engine is stuck although the process lives. `sequence`: of the last StepOutput sent.
    `draining`: send no new requests."""

    generation: Name
    sequence: Count
    progress: Count
    load: Load
    draining: bool = False


class StepOutput(Message, frozen=True):
    """All that one engine step has for one gateway, or a part of it if that is very much."""

    generation: Name
    sequence: Positive
    outputs: tuple[RequestOutput, ...]


class Goodbye(Message, frozen=True):
    """The worker leaves, and says so: what it still has is to go on elsewhere."""

    generation: Name
    reason: Text
    cause: LeaveCause = LeaveCause.FAILURE


# --- gateway -> worker -----------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The gateway takes the worker in. `epoch` names this run of the gateway, `introduction` is that of the Hello that
    is answered: a Welcome that comes late is told from the one waited for."""

    epoch: Name
    introduction: Positive


class Refused(Message, frozen=True):
    """The handshake failed, and fails again while nothing changes on either side; or, with `again`, this link is of no
    use any more, and a new one may be."""

    reason: Text
    again: bool = False


class Reintroduce(Message, frozen=True):
    """The gateway does not know the sender (it was restarted, or has given it up): say Hello again."""

    epoch: Name


class GatewayBeat(Message, frozen=True):
    """The gateway lives. Another `epoch` than at Welcome: what the old one owned is cancelled. `sequence`: of the last
    numbered message sent."""

    epoch: Name
    sequence: Count


class DecodeTarget(Part, frozen=True):
    """Where a prefill worker ships KV to."""

    worker_id: Name
    generation: Name
    kv_endpoint: Endpoint


class PrefillSource(Part, frozen=True):
    """Which start of which prefill worker a decode worker takes KV from."""

    worker_id: Name
    generation: Name


class PrefillRequest(Message, frozen=True):
    """Compute the prompt, with the output so far, and one more token. Without a `target` the request
    ends with that token. `sequence`: 0 until it is sent.

    `siblings`: further choices of the prompt. It is computed once and shipped once, under the name of `request`, which
    leads them; each draws its own first token, has its own outputs and its own end, and may be cancelled by itself."""

    request: RequestSpec
    target: DecodeTarget | None
    sequence: Count = 0
    siblings: Siblings = ()

    @property
    def specs(self) -> tuple[RequestSpec, ...]:
        """All choices, the leader first."""
        return (self.request, *(sibling.spec(self.request) for sibling in self.siblings))


class DecodeRequest(Message, frozen=True):
    """Reserve room, take the KV from `source`, and go on from the first new token; without a `source`, compute the
    prompt here. `sequence` and `siblings` as above: there is one KV for all of them."""

    request: RequestSpec
    source: PrefillSource | None
    sequence: Count = 0
    siblings: Siblings = ()

    @property
    def specs(self) -> tuple[RequestSpec, ...]:
        """All choices, the leader first."""
        return (self.request, *(sibling.spec(self.request) for sibling in self.siblings))


class ResetPrefixCache(Message, frozen=True):
    """Serve nothing from what earlier requests have left in the pool. `sequence` as above."""

    sequence: Count = 0


class SwitchRole(Message, frozen=True):
    """Drain, leave, and come back as a worker of this role. `timeout_s`: what running requests get to end in, seconds;
    None leaves that to the worker. `sequence` as above."""

    role: Role
    timeout_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_DRAIN_S)] | None = None
    sequence: Count = 0


class Cancel(Message, frozen=True):
    """Nobody waits for (request, attempt) any more. `sequence` as above."""

    request_id: Name
    attempt: Attempt
    sequence: Count = 0


WorkerToGateway = Hello | Heartbeat | StepOutput | Goodbye
RequestMessage = PrefillRequest | DecodeRequest | Cancel | ResetPrefixCache | SwitchRole
"""What a gateway numbers."""
GatewayToWorker = Welcome | Refused | Reintroduce | GatewayBeat | RequestMessage


decode_from_worker: Final[Decoder[WorkerToGateway]] = Decoder(WorkerToGateway)
decode_from_gateway: Final[Decoder[GatewayToWorker]] = Decoder(GatewayToWorker)
