"""What is said of a request: what is asked for, how far it is, and what has come of it."""

from enum import Enum
from typing import Annotated

import msgspec

from kvtransfer.codec import Attempt, Count, Fraction, Name, Part, Positive, Seconds, Text

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
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
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
TokenIds = Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]
BadSequence = Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=MAX_BAD_SEQUENCE_TOKENS)]


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
    logit_bias: LogitBias = msgspec.field(default_factory=dict)
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
    events: dict[LifetimeEvent, Seconds] = msgspec.field(default_factory=dict)
    num_cached: Count = 0
    logprobs: Annotated[tuple[TokenLogprob, ...], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)] = ()
    prompt_logprobs: PromptLogprobs | None = None
