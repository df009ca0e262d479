"""What workers say of themselves: what they are, what they hold, and how much they have to do."""

from enum import Enum

from kvtransfer.codec import Count, Fraction, Part, Positive, Text


class Role(Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class LeaveCause(Enum):
    """What makes a worker say Goodbye."""

    SHUTDOWN = "shutdown"  # it was told to stop
    ROLE_SWITCH = "role_switch"  # it was told to take its other role, and comes back with it
    FAILURE = "failure"  # it can't go on


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
