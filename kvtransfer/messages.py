"""The protocol between workers and gateways, and what messages of both protocols have in common: that of the KV
hand-over is `kvtransfer/kv_messages.py`.

Encoding is msgpack, one message a frame. A struct is a map with a `type` tag; unknown fields, wrong types and
values out of range are refused while decoding, so what a handler receives is already within these bounds.

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

from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

from kvtransfer.errors import MessageError

PROTOCOL_VERSION = 7

MAX_CONTROL_BYTES = 16 << 20
"""Upper bound of a control frame, bytes. A prompt of a million token ids takes about 5 MB."""
MAX_PROMPT_TOKENS = 1 << 20
MAX_TOKEN_ID = (1 << 31) - 1
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 128
"""Choices of one prompt that a request may ask for; so a group has one member less beside its leader."""
MAX_LOGPROBS = 20
"""Alternatives to one token."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""Log probabilities of one prompt, alternatives included: they fill less than a third of a control frame."""
MIN_LOGPROB = -9999.0
"""In place of -inf, which JSON has no word for: of a token that can't come."""
MAX_GRAMMAR_CHARS = 1 << 16
MAX_BAD_SEQUENCES = 256
MAX_BAD_SEQUENCE_TOKENS = 256
MAX_ALLOWED_TOKEN_IDS = 1 << 18
MAX_TEXT_CHARS = 2048
MAX_DRAIN_S = 3600.0
"""Longest time that a worker may be given to end what it runs, seconds."""
MAX_ERROR_CHARS = 256
"""Upper bound of what a `MessageError` says: it may quote the sender, and it goes into a log."""

NAME_PATTERN = r"^[A-Za-z0-9_.:-]{1,128}\Z"
"""A name is also a ZeroMQ routing id (at most 255 bytes) and goes into logs, so: ASCII, no spaces, no line ends."""

Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
Endpoint = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53))]
Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 53))]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
Attempt = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Logprob = Annotated[float, msgspec.Meta(ge=MIN_LOGPROB, le=0.0)]
NumLogprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
TopP = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
RepetitionPenalty = Annotated[float, msgspec.Meta(gt=0.0, le=1e4)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]], msgspec.Meta(max_length=MAX_LOGIT_BIAS)
]
RequestKey = tuple[str, int]
"""(request_id, attempt): names one hand-over."""
TokenIds = Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]
BadSequence = Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=MAX_BAD_SEQUENCE_TOKENS)]


class Role(Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class EndReason(Enum):
    """Why a worker is done with (request, attempt). Exactly one end a worker and attempt."""

    STOP = "stop"  # an EOS or stop token was sampled
    LENGTH = "length"  # max_tokens or max_model_len reached
    HANDED_OVER = "handed_over"  # prefill only: decode has all of the KV and the first token
    CANCELLED = "cancelled"  # the gateway asked for it
    REJECTED = "rejected"  # the request itself is wrong or can never fit here; the client's fault
    OVERLOADED = "overloaded"  # queues full: try later
    FAILED = "failed"  # this worker or its peer could not go on; not the client's fault

    @property
    def is_error(self) -> bool:
        return self in (EndReason.REJECTED, EndReason.OVERLOADED, EndReason.FAILED)


class LeaveCause(Enum):
    """What makes a worker say Goodbye."""

    SHUTDOWN = "shutdown"  # it was told to stop
    ROLE_SWITCH = "role_switch"  # it was told to take its other role, and comes back with it
    FAILURE = "failure"  # it can't go on


class LifetimeEvent(Enum):
    """The named clock readings of a request, in order. Workers report seconds since RECEIVED on their own clock.

    prefill:  RECEIVED --- SCHEDULED --- FIRST_TOKEN --- ENDED
                        KV_STARTED --- KV_READY --- KV_TAKEN        (KV_STARTED comes after KV_READY if decode is late)
    decode:   RECEIVED --- OFFERED --- RESERVED --- FIRST_FRAME --- SPLICED --- RUNNING --- ENDED
    """

    RECEIVED = "received"
    SCHEDULED = "scheduled"  # prefill: first chunk goes into a batch
    FIRST_TOKEN = "first_token"  # prefill: the first token is sampled
    KV_STARTED = "kv_started"  # prefill: the first KV frame goes out
    KV_READY = "kv_ready"  # prefill: the KV of all layers and tokens is computed
    KV_TAKEN = "kv_taken"  # prefill: decode has said that it has all of the KV and the first token
    OFFERED = "offered"  # decode: prefill holds blocks for it and has offered its KV
    RESERVED = "reserved"  # decode: blocks are reserved and the grant is out
    FIRST_FRAME = "first_frame"  # decode: the first KV frame has arrived
    SPLICED = "spliced"  # decode: the last KV token is in the pool and the first token is known
    RUNNING = "running"  # decode: first step that includes the request
    ENDED = "ended"


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="type"):
    """Base of all messages; the tag is the class name."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what messages are made of."""


# --- identity of a worker --------------------------------------------------------------------------


class Fingerprint(Part, frozen=True):
    """Identity of a model. Two workers may exchange KV only if all fields are equal.

    `config`: digest over the fields of config.json that change the forward pass; `weights`: digest over the
    names, shapes, dtypes and sampled bytes of all tensors; `dtype`: what the forward computes in.
    """

    architecture: Text
    config: Text
    weights: Text
    dtype: Text
    vocab_size: Positive


class KvLayout(Part, frozen=True):
    """Shape of one token's KV: per layer, K and V of [num_kv_heads, head_dim] elements of `dtype`.

    `block_size` is the worker's own and may differ between peers; the wire never speaks of blocks.
    """

    num_layers: Positive
    num_kv_heads: Positive
    head_dim: Positive
    dtype: Text
    block_size: Positive


class Limits(Part, frozen=True):
    """What a worker can take: tokens a request (prompt + output), requests at once, tokens in the KV pool."""

    max_model_len: Positive
    max_num_seqs: Positive
    kv_tokens: Positive


class KvTraffic(Part, frozen=True):
    """What has become of KV since the worker's start. Prefill: `num_bytes` were sent, `num_resent_bytes` of them asked
    for again. Decode: `num_bytes` were spliced, and counts of frames that were not, and of KvResends."""

    num_bytes: Count = 0
    num_resent_bytes: Count = 0
    num_late: Count = 0  # for a transfer that is over, or from strangers
    num_stale: Count = 0  # behind one that was lost or damaged
    num_corrupt: Count = 0  # the checksum did not fit
    num_resends: Count = 0


class SwapLoad(Part, frozen=True):
    """The host's memory for KV of preempted requests, in blocks. Since the worker's start: `num_out` blocks went there,
    `num_in` came back, and `num_refused` requests found no room."""

    num_blocks: Count = 0
    num_free: Count = 0
    num_out: Count = 0
    num_in: Count = 0
    num_refused: Count = 0


class Load(Part, frozen=True):
    """A snapshot for routing and metrics; counters run from the worker's start.

    `kv_waste`: share of the slots in owned blocks that hold no token. `prefix_queries` and `prefix_hits` count prompt
    tokens that were looked up in the prefix cache and found there; `prefix_evictions` counts blocks.
    """

    num_running: Count
    num_waiting: Count
    kv_usage: Fraction
    num_free_blocks: Count = 0
    num_blocks: Count = 0
    kv_waste: Fraction = 0.0
    num_preemptions: Count = 0
    prefix_queries: Count = 0
    prefix_hits: Count = 0
    prefix_evictions: Count = 0
    kv_traffic: KvTraffic = KvTraffic()
    swap: SwapLoad = SwapLoad()


# --- a request -------------------------------------------------------------------------------------


class GrammarKind(Enum):
    """How a grammar is written; what each takes is told in `grammar/source.py`."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


class Grammar(Part, frozen=True):
    """The form that an output must have. `vocabulary` names the tokens that the gateway means, see
    `grammar/vocabulary.py`."""

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
    vocabulary: Text


class SamplingParams(Part, frozen=True):
    """How to draw tokens and when to stop. Defaults: plain sampling at temperature 1.

    `seed` is always set (the gateway draws one at admission if the client gave none). `stop_token_ids` count
    beside the EOS ids of the model, which `ignore_eos` switches off. `logit_bias`: token id to an addend of its logit.
    `num_logprobs`: how many alternatives are told beside each output token's log probability, None: nothing is told;
    `num_prompt_logprobs`: the same of the prompt's tokens, by whoever computes the prompt.
    `bad_words`: sequences of tokens that the output must not hold. `allowed_token_ids`: all others are never drawn;
    none given: any may be.
    """

    max_tokens: Positive
    seed: Seed
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=1e4)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)] = 0  # 0: off
    top_p: TopP = 1.0
    min_p: Fraction = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = {}
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    choice_index: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    num_logprobs: NumLogprobs | None = None
    num_prompt_logprobs: NumLogprobs | None = None
    grammar: Grammar | None = None
    bad_words: Annotated[tuple[BadSequence, ...], msgspec.Meta(max_length=MAX_BAD_SEQUENCES)] = ()
    allowed_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] = ()


class RequestSpec(Part, frozen=True):
    """All that is needed to rebuild a request anywhere: its tokens and how to go on.

    `output_token_ids`: what earlier attempts have generated already. The first new token stands behind them, and all
    that counts output (max_tokens, min_tokens, penalties, the position of a draw) counts them too. `cache_salt`: KV is
    shared only among requests with the same salt. `priority`: the smaller, the sooner, where a worker schedules by it.
    """

    request_id: Name
    attempt: Attempt
    prompt_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
    sampling: SamplingParams
    output_token_ids: TokenIds = ()
    cache_salt: Text = ""
    priority: Priority = 0


class Sibling(Part, frozen=True):
    """Another choice of the same prompt: the request that leads its group, but for its own id and choice index. All of
    a group are at the same attempt."""

    request_id: Name
    choice_index: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]

    def spec(self, leader: RequestSpec) -> RequestSpec:
        """The request that it stands for."""
        sampling = msgspec.structs.replace(leader.sampling, choice_index=self.choice_index)
        return msgspec.structs.replace(leader, request_id=self.request_id, sampling=sampling)


Siblings = Annotated[tuple[Sibling, ...], msgspec.Meta(max_length=MAX_CHOICES - 1)]


class RequestEnd(Part, frozen=True):
    """The terminal word of a worker on (request, attempt). `message` is for people and safe to show a client."""

    reason: EndReason
    message: Text = ""


class TokenLogprob(Part, frozen=True, array_like=True):
    """How likely a token was to the model, and what the most likely ones were.

    Natural logarithms of softmax(logits) in float32, before bias, penalties, masks and temperature; what is below
    MIN_LOGPROB is told as that. `rank`: 1 is the most likely token; of equals the lower id comes first. `top`: token
    ids with their log probabilities, the most likely first, the token itself perhaps among them.
    """

    logprob: Logprob
    rank: Positive
    top: Annotated[tuple[tuple[TokenId, Logprob], ...], msgspec.Meta(max_length=MAX_LOGPROBS)] = ()


class Drawn(Part, frozen=True, array_like=True):
    """A sampled token, and how likely it was, if its request asks for that."""

    token_id: TokenId
    logprob: TokenLogprob | None = None


class PromptLogprobs(Part, frozen=True):
    """Of the prompt's tokens [start, start + len(tokens)), what was likely there. The first token has none."""

    start: Positive
    tokens: Annotated[tuple[TokenLogprob, ...], msgspec.Meta(max_length=MAX_PROMPT_LOGPROBS)]


class RequestOutput(Part, frozen=True):
    """New tokens of one request: output tokens [start, start + len(token_ids)), and its end if this is the last.

    `num_cached`: of a prefill worker's tokens, how many it found in its prefix cache. `events` holds the worker's
    lifetime readings, sent with the first token and with the end. Decode sends them once
    more, with no token, as soon as it has reserved room: until then it may still turn the request away.

    `logprobs`: one for each of `token_ids` if the request asks for them, else none. `prompt_logprobs` come in order and
    without gaps, each once, and the last of them no later than the first token of the same worker.
    """

    request_id: Name
    attempt: Attempt
    start: Count
    token_ids: TokenIds = ()
    end: RequestEnd | None = None
    events: dict[LifetimeEvent, Seconds] = {}
    num_cached: Count = 0
    logprobs: Annotated[tuple[TokenLogprob, ...], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)] = ()
    prompt_logprobs: PromptLogprobs | None = None


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


_Incoming = TypeVar("_Incoming")


def encode(message: Message) -> bytes:
    """One message as one msgpack frame."""
    return msgspec.msgpack.encode(message)


class Decoder(Generic[_Incoming]):
    """Decodes frames into one direction's messages; anything else is a `MessageError`."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[_Incoming] = msgspec.msgpack.Decoder(union)

    def __call__(self, frame: bytes | memoryview) -> _Incoming:
        if len(frame) > MAX_CONTROL_BYTES:
            raise MessageError(f"frame of {len(frame)} bytes, at most {MAX_CONTROL_BYTES} are allowed")
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"malformed message: {str(error)[:MAX_ERROR_CHARS]!r}") from error

    def or_error(self, frames: Sequence[bytes | memoryview]) -> _Incoming | MessageError:
        """The message in `frames`, which must be one frame, or what is wrong with it."""
        if len(frames) != 1:
            return MessageError(f"{len(frames)} frames, this message is one")
        try:
            return self(frames[0])
        except MessageError as error:
            return error


decode_from_worker: Final[Decoder[WorkerToGateway]] = Decoder(WorkerToGateway)
decode_from_gateway: Final[Decoder[GatewayToWorker]] = Decoder(GatewayToWorker)
