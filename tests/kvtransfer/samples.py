"""One valid message of each kind, with every field away from its default, and identities that fit each other."""

from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.kv_messages import (
    KvAbort,
    KvCredit,
    KvDone,
    KvFirstToken,
    KvGrant,
    KvHeader,
    KvHello,
    KvOffer,
    KvResend,
    KvRevoke,
    KvWelcome,
)
from kvtransfer.messages import (
    Cancel,
    DecodeRequest,
    DecodeTarget,
    GatewayBeat,
    Goodbye,
    Heartbeat,
    Hello,
    PrefillRequest,
    PrefillSource,
    Refused,
    Reintroduce,
    ResetPrefixCache,
    StepOutput,
    SwitchRole,
    Welcome,
)
from kvtransfer.request_parts import (
    MIN_LOGPROB,
    Drawn,
    EndReason,
    Grammar,
    GrammarKind,
    LifetimeEvent,
    PromptLogprobs,
    RequestEnd,
    RequestOutput,
    RequestSpec,
    SamplingParams,
    Sibling,
    TokenLogprob,
)
from kvtransfer.worker_facts import Fingerprint, KvLayout, KvTraffic, LeaveCause, Limits, Load, Role, SwapLoad

FINGERPRINT = Fingerprint(architecture="Llama", config="c0", weights="w0", dtype="float32", vocab_size=100)
LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32", block_size=4)
TARGET = DecodeTarget("decode-0", "g2", "tcp://127.0.0.1:9")

SAMPLING = SamplingParams(
    max_tokens=7,
    seed=-(1 << 63),
    temperature=0.5,
    top_k=3,
    top_p=0.25,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-2.0,
    frequency_penalty=2.0,
    logit_bias={5: -100.0, 0: 100.0},
    min_tokens=2,
    ignore_eos=True,
    stop_token_ids=(4, 2),
    choice_index=1,
    num_logprobs=0,
    num_prompt_logprobs=20,
    grammar=Grammar(GrammarKind.CHOICE, '["yes", "no"]', "v0"),
    bad_words=((3,), (1, 2)),
    allowed_token_ids=(0, 8),
)
SPEC = RequestSpec("r:1.a-b_c", 3, (0, (1 << 31) - 1), SAMPLING, (7, (1 << 31) - 1))
LOGPROB = TokenLogprob(-0.5, 2, ((7, -0.25), (9, -0.5)))
OUTPUT = RequestOutput(
    "r",
    0,
    4,
    (9, 8),
    RequestEnd(EndReason.STOP, "done"),
    {LifetimeEvent.RECEIVED: 0.0, LifetimeEvent.ENDED: 2.5},
    3,
    (LOGPROB, TokenLogprob(MIN_LOGPROB, 100)),
    PromptLogprobs(1, (LOGPROB, LOGPROB)),
)

FROM_WORKER = (
    Hello(
        PROTOCOL_VERSION, Role.DECODE, "decode-0", "g2", FINGERPRINT, LAYOUT, Limits(10, 2, 64), "tcp://127.0.0.1:9", 3
    ),
    Hello(
        PROTOCOL_VERSION,
        Role.DECODE,
        "decode-0",
        "g2",
        FINGERPRINT,
        LAYOUT,
        Limits(10, 2, 64),
        "tcp://127.0.0.1:9",
        shares_prefixes=False,
        can_switch=True,
        eos_token_ids=(0, 2),
    ),
    Heartbeat(
        "g2",
        4,
        5,
        Load(1, 2, 0.5, 3, 4, 0.25, 5, 6, 7, 8, KvTraffic(1, 2, 3, 4, 5, 6), SwapLoad(1, 2, 3, 4, 5)),
        draining=True,
    ),
    StepOutput("g2", 4, (OUTPUT, RequestOutput("q", 1, 0))),
    Goodbye("g2", "because"),
    Goodbye("g2", "switching", LeaveCause.ROLE_SWITCH),
)
FROM_GATEWAY = (
    Welcome("e", 3),
    Refused("differs"),
    Reintroduce("e"),
    GatewayBeat("e", 7),
    PrefillRequest(SPEC, TARGET, 1),
    PrefillRequest(SPEC, None, 2),
    DecodeRequest(SPEC, PrefillSource("prefill-0", "g1"), 3),
    DecodeRequest(SPEC, None, 4),
    PrefillRequest(SPEC, TARGET, 1, (Sibling("s", 2), Sibling("t", 3))),
    DecodeRequest(SPEC, None, 4, (Sibling("s", 2),)),
    ResetPrefixCache(5),
    Cancel("r", 1 << 16, 4),
    SwitchRole(Role.DECODE, 3600.0, 6),
    SwitchRole(Role.PREFILL, sequence=7),
)
FROM_PREFILL = (
    KvHello(PROTOCOL_VERSION, "prefill-0", "g1", FINGERPRINT, LAYOUT, 1, 2),
    KvOffer("r", 0, 12, 256, 3),
    KvHeader("r", 0, 1, 2, 3, 0, 2, "float32", 192, 2, (1 << 32) - 1, 2),
    KvFirstToken("r", 0, 99, 512, 3, LOGPROB, {"s": Drawn(98, LOGPROB), "t": Drawn(0)}),
    KvAbort("r", 0, "gone"),
)
FROM_DECODE = (
    KvWelcome("g2", ("float8_e4m3fn",)),
    Refused("differs"),
    KvGrant("r", 0, 4, 1 << 20),
    KvCredit("r", 0, 512),
    KvResend("r", 0, 1, 5, 3),
    KvDone("r", 0),
    KvRevoke("r", 0, "no longer wanted"),
)


def spec(
    request_id: str = "r",
    num_prompt: int = 4,
    max_tokens: int = 4,
    attempt: int = 0,
    resumed=(),
    prompt=None,
    cache_salt="",
    priority=0,
    **sampling,
) -> RequestSpec:
    """`resumed`: output tokens that an earlier attempt has generated; `prompt`: in place of the usual tokens."""
    params = SamplingParams(max_tokens=max_tokens, seed=1, **sampling)
    token_ids = tuple(range(10, 10 + num_prompt)) if prompt is None else tuple(prompt)
    return RequestSpec(request_id, attempt, token_ids, params, tuple(resumed), cache_salt, priority)
