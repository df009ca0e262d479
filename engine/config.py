"""Settings that prefill and decode workers share."""

import re
from dataclasses import dataclass

from engine.queue_rules import QueueRules
from kvtransfer.addresses import check_endpoint
from kvtransfer.codec import NAME_PATTERN
from kvtransfer.errors import SettingsError
from kvtransfer.faults import FaultPlan
from kvtransfer.settings import ProcessSettings, Settings, like, setting

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Settings):
    """One worker: its model, its memory, whom it talks to. Times are in seconds."""

    model: str = setting(
        DEFAULT_MODEL,
        "Checkpoint to serve: the embedded default's name, a local Hugging Face folder, or a hub name.",
        group="model",
        metavar="PATH_OR_NAME",
    )
    dtype: str = setting(
        "auto",
        "Number format of weights and activations; auto takes the checkpoint's.",
        group="model",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = setting(
        None,
        "Most tokens of one request, prompt and output together.",
        group="model",
        ge=1,
        default_text="the model's own limit",
    )
    device: str = setting(
        "auto", "Where to compute; auto takes a GPU if there is one.", group="device", choices=("auto", "cpu", "cuda")
    )
    kernels: str = setting(
        "auto",
        "Kernel backend; auto takes the best for the device.",
        group="device",
        choices=("auto", "reference", "cpu", "triton"),
    )
    cpu_threads: int | None = setting(
        None, "Threads for computing on a CPU.", group="device", ge=1, le=1024, default_text="all cores"
    )
    max_num_seqs: int = setting(64, "Most requests in one batch.", group="batching and memory", ge=1, le=65536)
    max_num_partial_prefills: int | None = setting(
        None,
        "Most prompts that are computed in part at once. On decode they share --max-num-prefill-tokens evenly, so that "
        "short ones need not wait for a long one; on prefill, where short ones come first anyway, another one begins "
        "only in a step that completes it.",
        group="batching and memory",
        ge=1,
        le=65536,
        default_text="1 on decode: one after another; no limit on prefill",
    )
    max_waiting: int = setting(
        256, "Most requests that wait for room; more are turned away.", group="batching and memory", ge=1, le=1 << 20
    )
    block_size: int = setting(
        16,
        "Tokens in one block of the KV pool; prefill and decode may differ.",
        group="batching and memory",
        ge=1,
        le=1024,
    )
    enable_prefix_caching: bool = setting(
        True, "Keep the KV of prompts for later ones that begin alike.", group="batching and memory"
    )
    scheduling_policy: str = setting(
        "fcfs",
        "Who comes first: fcfs goes by arrival, priority by the requests' priority and then by arrival.",
        group="batching and memory",
        choices=("fcfs", "priority"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Number format of the KV cache, the same on all workers of a model; auto takes that of --dtype. fp8 is e4m3, "
        "with the checkpoint's k_scale and v_scale if it has any: half the memory and half the bytes between workers.",
        group="batching and memory",
        choices=("auto", "bfloat16", "float16", "float32", "fp8"),
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "On a GPU: share of its memory for weights, activations and KV pool.",
        group="batching and memory",
        ge=0.01,
        le=1.0,
    )
    kv_cache_gib: float = setting(
        2.0, "On a CPU: size of the KV pool in GiB.", group="batching and memory", ge=0.001, le=1 << 16
    )
    gateway: tuple[str, ...] = setting(
        ("tcp://127.0.0.1:8790",),
        "Control address of each gateway to work for; repeat the flag or separate by commas.",
        group="network",
        metavar="tcp://HOST:PORT",
    )
    curve_dir: str | None = like(ProcessSettings, "curve_dir")
    curve_name: str | None = setting(
        None,
        "Name of this worker's own key; its worker id must be this name, or begin with it and a dash.",
        group="network",
        metavar="NAME",
        default_text="the role",
    )
    worker_id: str | None = setting(
        None,
        "Name of this worker, unique in the cluster.",
        group="process",
        default_text="made of role, host and process id",
    )
    heartbeat_interval_s: float = setting(
        0.5, "Seconds between signs of life to a gateway.", group="timing", ge=0.05, le=60
    )
    gateway_dead_after_s: float = setting(
        5.0,
        "A gateway that is silent for so many seconds is given up, and its requests with it.",
        group="timing",
        ge=0.1,
        le=3600,
    )
    lease_s: float = setting(
        60.0,
        "Longest silence of the other worker of a request, in seconds, before its blocks are taken back.",
        group="timing",
        ge=0.1,
        le=86400,
    )
    queue_timeout_s: float = setting(
        300.0,
        "Longest wait of a request for room where its prompt is computed, in seconds.",
        group="timing",
        ge=0.1,
        le=86400,
    )
    shutdown_timeout_s: float = setting(
        10.0, "Seconds that running requests get to end after SIGTERM.", group="timing", ge=0, le=3600
    )
    log_level: str = like(ProcessSettings, "log_level")
    fault: str | None = setting(
        None,
        "For tests: fail on purpose (kill, stop, die, die-kv, die-control) when the N-th request reaches an event of "
        "its life, as in kill@spliced:2.",
        group="process",
        metavar="ACTION@EVENT:N",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gateway:
            raise SettingsError("--gateway needs at least one address")
        if len(set(self.gateway)) != len(self.gateway):
            raise SettingsError("--gateway names the same address twice")
        for address in self.gateway:
            check_endpoint("--gateway", address)
        if self.worker_id is not None and not re.fullmatch(NAME_PATTERN, self.worker_id):
            raise SettingsError("--worker-id takes 1 to 128 letters, digits and _.:-")
        if self.curve_name is not None and self.curve_dir is None:
            raise SettingsError("--curve-name names a key in --curve-dir, which is missing")
        if self.fault is not None:
            FaultPlan.parse(self.fault)
        if self.gateway_dead_after_s <= self.heartbeat_interval_s:
            raise SettingsError("--gateway-dead-after-s must be longer than --heartbeat-interval-s")

    @property
    def queue_rules(self) -> QueueRules:
        return QueueRules(
            max_waiting=self.max_waiting,
            share_prefixes=self.enable_prefix_caching,
            by_priority=self.scheduling_policy == "priority",
        )


def default_worker_id(prefix: str, host: str, pid: int) -> str:
    """A name for the wire; whatever a host name may hold beyond letters and digits becomes a dash."""
    return f"{prefix}-{re.sub('[^A-Za-z0-9-]', '-', host)[:64]}-{pid}"
