"""Settings of the commands that are no roles: `kvsplice serve`, `fetch-model`, `health`."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from engine.config import DEFAULT_MODEL
from kvtransfer.addresses import check_host
from kvtransfer.emulated_link import LinkSpec
from kvtransfer.errors import SettingsError
from kvtransfer.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class FetchConfig(Settings):
    """Which model to bring onto this machine."""

    model: str = setting(
        DEFAULT_MODEL,
        "Model to fetch: the embedded default's name or a hub name; a local folder is only looked at.",
        group="model",
        metavar="PATH_OR_NAME",
    )


@dataclass(frozen=True, kw_only=True)
class HealthConfig(Settings):
    """Whose health to ask for."""

    url: str = setting("http://127.0.0.1:8000", "The gateway to ask.", group="network", metavar="http://HOST:PORT")
    worker_id: str | None = setting(
        None,
        "Ask whether the gateway gives this worker requests, instead of whether the whole cluster is ready.",
        group="process",
        default_text="the whole cluster",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_http(self.url):
            raise SettingsError(f"--url must be http://HOST:PORT or https://HOST:PORT, not {self.url!r}")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no address, or no number for a port
        return False


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Settings):
    """All roles on this machine. Settings that a role has under the same name are passed on to it."""

    model: str = setting(
        DEFAULT_MODEL,
        "Checkpoint to serve: the embedded default's name, a local Hugging Face folder, or a hub name.",
        group="model",
        metavar="PATH_OR_NAME",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "Names that requests may use; the first one stands in answers.",
        group="model",
        metavar="NAME[,NAME]",
        default_text="the model's name",
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
    default_seed: int | None = setting(
        None,
        "Seed of requests that bring none.",
        group="model",
        flag="seed",
        ge=-(1 << 63),
        le=(1 << 63) - 1,
        default_text="drawn for each request",
    )
    prefill: int = setting(
        1,
        "Number of prefill workers; with 0, decode workers compute all prompts themselves.",
        group="workers",
        ge=0,
        le=64,
    )
    decode: int = setting(1, "Number of decode workers.", group="workers", ge=1, le=64)
    device: str = setting(
        "auto",
        "Where workers compute; auto takes GPUs if there are any. Workers are dealt out over the GPUs in turn, and "
        "share one's --gpu-memory-utilization if there are more workers than GPUs.",
        group="workers",
        choices=("auto", "cpu", "cuda"),
    )
    kernels: str = setting(
        "auto",
        "Kernel backend; auto takes the best for the device.",
        group="workers",
        choices=("auto", "reference", "cpu", "triton"),
    )
    enforce_eager: bool = setting(
        False,
        "On a GPU: launch each kernel of a decode step by itself instead of replaying CUDA graphs.",
        group="workers",
    )
    cpu_threads: int | None = setting(
        None,
        "Threads of each worker for computing on a CPU.",
        group="workers",
        ge=1,
        le=1024,
        default_text="the cores, split evenly among workers",
    )
    default_mode: str = setting(
        "auto",
        "Where prompts are computed, unless a request says so in X-KVSplice-Mode: disaggregated on a prefill worker, "
        "local on the decode worker itself, auto on either (see --local-prefill-threshold).",
        group="modes",
        choices=("auto", "disaggregated", "local"),
    )
    local_prefill_threshold: int = setting(
        64,
        "In auto mode, decode computes a prompt itself if all but so many tokens are in its cache; 0: only if there is "
        "no prefill worker.",
        group="modes",
        ge=0,
        le=1 << 20,
    )
    max_num_batched_tokens: int = setting(
        512, "Prompt tokens in one step of a prefill worker.", group="batching and memory", ge=1, le=1 << 20
    )
    max_num_prefill_tokens: int = setting(
        256,
        "Prompt tokens in one step of a decode worker, beside its running requests.",
        group="batching and memory",
        ge=1,
        le=1 << 20,
    )
    max_num_seqs: int = setting(
        64, "Most requests in one batch of a worker.", group="batching and memory", ge=1, le=65536
    )
    block_size: int = setting(16, "Tokens in one block of a KV pool.", group="batching and memory", ge=1, le=1024)
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
        2.0, "On a CPU: size of each worker's KV pool in GiB.", group="batching and memory", ge=0.001, le=1 << 16
    )
    kv_wire_dtype: str = setting(
        "auto",
        "What KV is sent as; auto sends it as it is, fp8 halves bfloat16's bytes and rounds to 3 bits of mantissa.",
        group="network",
        choices=("auto", "fp8"),
    )
    kv_link: str | None = setting(
        None,
        "For experiments: send KV as if over such a link, any of delay=20ms,bandwidth=1Gbit,loss=0.01.",
        group="network",
        metavar="NAME=VALUE[,...]",
        default_text="the link as it is",
    )
    kv_checksum: bool = setting(
        False,
        "Send a CRC-32 with each KV frame; a decode worker asks again for what arrives damaged.",
        group="network",
    )
    host: str = setting("127.0.0.1", "Address of the HTTP server.", group="network", metavar="HOST")
    port: int = setting(8000, "Port of the HTTP server; 0 takes any free one.", group="network", ge=0, le=65535)
    api_key: str | None = setting(
        None,
        "Key that clients must send as a bearer token; the variable keeps it out of process lists.",
        group="network",
        metavar="KEY",
        default_text="no key needed",
        secret=True,
    )
    curve_dir: str | None = setting(
        None,
        "Folder with the keys of our processes, made by `kvsplice keys`: all connections between them are encrypted, "
        "and take known keys alone.",
        group="network",
        metavar="DIR",
        default_text="no keys, connections in clear",
    )
    sample: bool = setting(True, "Stream one sample completion to the terminal when ready.", group="process")
    ready_timeout_s: float = setting(
        600.0, "Seconds that the workers get to load the model and be ready.", group="process", ge=1, le=86400
    )
    log_level: str = setting("info", "How much to log.", group="process", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_host("--host", self.host)
        if self.kv_link is not None:
            LinkSpec.parse(self.kv_link)
        if self.prefill == 0 and self.default_mode == "disaggregated":
            raise SettingsError("--default-mode disaggregated needs a prefill worker, and --prefill is 0")
        if self.prefill == 0 and (self.kv_link or self.kv_checksum or self.kv_wire_dtype != "auto"):
            raise SettingsError("--kv-link, --kv-checksum, --kv-wire-dtype need a prefill worker, and --prefill is 0")
