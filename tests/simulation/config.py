"""What a world is made of, drawn from its seed."""

import random
from dataclasses import dataclass
from enum import Enum

from engine.queue_rules import QueueRules

LOSSY_KEEPALIVE_S = 1.0


class Climate(Enum):
    """What may go wrong in a world. The calmer it is, the more is demanded."""

    CALM = "calm"  # delays only: every request must be answered in full
    LOSSY = "lossy"  # KV frames are damaged or lost: every request must be answered in full all the same
    CLIENTS = "clients"  # clients leave, read slowly, come in bursts, ask for too much; queues and pools are short
    NETWORK = "network"  # and paths are blocked one way or both, and connections break
    ALL = "all"  # and processes crash, stop for a while, are slow, and are told to end


@dataclass(frozen=True)
class WorldConfig:
    """Sizes and times of one world. Seconds, tokens, bytes and blocks."""

    climate: Climate
    num_prefill: int
    num_decode: int
    num_gateways: int
    num_requests: int
    num_layers: int
    prefill_block_size: int
    decode_block_size: int
    prefill_blocks: int
    decode_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_prefill_tokens: int
    queue_rules: QueueRules
    window_bytes: int
    kv_hwm: int  # messages from prefill to decode
    kv_back_hwm: int  # and back
    latency: tuple[float, float]
    step_s: float
    lease: float
    queue_timeout: float
    stream_buffer_tokens: int
    max_in_flight: int
    local_threshold: int
    same_prompt: float  # share of requests whose prompt is like that of another one
    several_choices: float  # share of calls that ask for more than one
    trouble_s: float  # until everything is healed
    num_faults: int
    fragility: float  # how often a message breaks its connection, until the healing
    with_checksum: bool
    damage: float  # share of KV frames, until the healing, if anything is to heal; as the next
    loss: float
    swap_blocks: int  # on the host of a decode worker; 0: what is preempted is computed again

    beat_interval: float = 0.5
    gateway_dead_after: float = 2.5
    worker_dead_after: float = 1.5
    stalled_after: float = 4.0
    tick: float = 0.25
    shutdown_timeout: float = 1.5
    failover_timeout: float = 6.0
    max_retries: int = 100  # out of the way: faults may take more of them than anybody would allow

    @property
    def keepalive(self) -> float:
        """Seconds between the repetitions of an offer: what is lost whole, window and all, is noticed by them."""
        return self.lease / 4 if self.climate is not Climate.LOSSY else LOSSY_KEEPALIVE_S

    @property
    def max_waiting(self) -> int:
        return self.queue_rules.max_waiting

    @property
    def is_calm(self) -> bool:
        """Nothing is wrong that clients could notice."""
        return self.climate in (Climate.CALM, Climate.LOSSY)

    @property
    def settle_s(self) -> float:
        """Within so long after the healing every request has ended: a loss is noticed, a lease runs out, and what
        waited behind is served. Without faults nothing has to be waited for."""
        return 60.0 if self.is_calm else 2 * self.lease + self.queue_timeout + 10.0

    @property
    def rest_s(self) -> float:
        """Within so long after the last answer nothing is left of anything."""
        return 20.0 if self.is_calm else 2 * self.lease + 2.0


def draw_config(rng: random.Random) -> WorldConfig:
    """Most worlds are small and cramped: there the corner cases are neighbours."""
    climate = rng.choices(list(Climate), weights=(2, 2, 2, 3, 4))[0]
    is_calm = climate in (Climate.CALM, Climate.LOSSY)
    is_tight = not is_calm and rng.random() < 0.4
    max_model_len = rng.choice((24, 40))
    prefill_block_size, decode_block_size = rng.choice((1, 2, 3, 4, 8)), rng.choice((1, 2, 3, 4, 8))
    room = max_model_len * (1 if is_tight else rng.choice((1, 2, 4)))
    may_break = climate in (Climate.NETWORK, Climate.ALL)
    may_damage = may_break or climate is Climate.LOSSY
    damage, loss = (rng.choice((0.0, 0.02, 0.2)) if may_damage else 0.0 for _ in range(2))
    slow_link = rng.random() < 0.3
    window_bytes = rng.choice((8, 48, 200, 4096))
    if climate is Climate.LOSSY:  # a window that is lost whole waits for the next offer: smaller ones take minutes
        window_bytes = max(window_bytes, 200)
    return WorldConfig(
        climate=climate,
        num_prefill=rng.choice((1, 1, 2, 3)),
        num_decode=rng.choice((1, 1, 2, 3)),
        num_gateways=rng.choice((1, 1, 1, 2)),
        num_requests=rng.choice((4, 8, 16, 20)),
        num_layers=rng.choice((1, 2, 3)),
        prefill_block_size=prefill_block_size,
        decode_block_size=decode_block_size,
        prefill_blocks=-(-room // prefill_block_size),
        decode_blocks=-(-room // decode_block_size),
        max_model_len=max_model_len,
        max_num_batched_tokens=rng.choice((1, 3, 8, 16, 64)),
        max_num_seqs=rng.choice((1, 2, 4, 8)) if not is_calm else rng.choice((4, 8)),
        max_num_prefill_tokens=rng.choice((1, 4, 64)),
        queue_rules=QueueRules(
            max_waiting=rng.choice((1, 3)) if is_tight else 128,
            share_prefixes=rng.random() < 0.7,
            by_priority=rng.random() < 0.3,
        ),
        window_bytes=window_bytes,
        kv_hwm=rng.choice((2, 8, 256)),
        kv_back_hwm=256 if is_calm else rng.choice((2, 256)),
        latency=(0.0005, 0.08 if slow_link else 0.01),
        step_s=rng.choice((0.005, 0.02, 0.05)),
        lease=600.0 if is_calm else rng.choice((0.8, 2.0, 5.0)),
        queue_timeout=600.0 if is_calm else rng.choice((1.0, 4.0)),
        stream_buffer_tokens=rng.choice((4, 64)) if not is_calm else 64,
        max_in_flight=4 if is_tight else 256,
        local_threshold=rng.choice((0, 4, 16)),
        same_prompt=rng.choice((0.0, 0.6)),
        several_choices=rng.choice((0.0, 0.3, 0.3, 0.8)),
        trouble_s=rng.uniform(1.0, 7.0),
        num_faults=rng.choice((1, 2, 4, 8)) if may_break else 0,
        fragility=rng.choice((0.0, 0.003, 0.03, 0.1)) if may_break else 0.0,
        with_checksum=damage > 0 or rng.random() < 0.3,
        damage=damage,
        loss=loss,
        swap_blocks=rng.choice((0, 0, 3, 64)),
    )
