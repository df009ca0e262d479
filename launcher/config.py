"""Settings of the commands that are no roles: `kvsplice serve`, `fetch-model`, `health`."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from decode.config import DecodeConfig, check_swap
from engine.config import DEFAULT_MODEL, EngineConfig
from gateway.config import GatewayConfig, check_admin
from kvtransfer.addresses import check_host
from kvtransfer.emulated_link import LinkSpec
from kvtransfer.errors import SettingsError
from kvtransfer.settings import ProcessSettings, Settings, like, setting
from prefill.config import PrefillConfig


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

    model: str = like(EngineConfig, "model")
    served_model_name: tuple[str, ...] = like(GatewayConfig, "served_model_name")
    dtype: str = like(EngineConfig, "dtype")
    max_model_len: int | None = like(EngineConfig, "max_model_len")
    default_seed: int | None = like(GatewayConfig, "default_seed")
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
    kernels: str = like(EngineConfig, "kernels", group="workers")
    enforce_eager: bool = like(DecodeConfig, "enforce_eager", group="workers")
    cpu_threads: int | None = setting(
        None,
        "Threads of each worker for computing on a CPU.",
        group="workers",
        ge=1,
        le=1024,
        default_text="the cores, split evenly among workers",
    )
    reserve_cores: bool = setting(
        True,
        "On a CPU with cores enough for all workers' threads: give each prefill worker cores that none of our other "
        "processes uses; not where workers may switch roles.",
        group="workers",
    )
    default_mode: str = like(GatewayConfig, "default_mode")
    local_prefill_threshold: int = like(GatewayConfig, "local_prefill_threshold")
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
    max_num_partial_prefills: int | None = like(EngineConfig, "max_num_partial_prefills")
    preemption_mode: str = like(DecodeConfig, "preemption_mode")
    swap_space: float | None = like(DecodeConfig, "swap_space")
    block_size: int = setting(16, "Tokens in one block of a KV pool.", group="batching and memory", ge=1, le=1024)
    enable_prefix_caching: bool = like(EngineConfig, "enable_prefix_caching")
    scheduling_policy: str = like(EngineConfig, "scheduling_policy")
    kv_cache_dtype: str = like(EngineConfig, "kv_cache_dtype")
    gpu_memory_utilization: float = like(EngineConfig, "gpu_memory_utilization")
    kv_cache_gib: float = setting(
        2.0, "On a CPU: size of each worker's KV pool in GiB.", group="batching and memory", ge=0.001, le=1 << 16
    )
    kv_wire_dtype: str = like(PrefillConfig, "kv_wire_dtype")
    kv_link: str | None = like(PrefillConfig, "kv_link")
    kv_checksum: bool = like(PrefillConfig, "kv_checksum")
    host: str = like(GatewayConfig, "host")
    port: int = like(GatewayConfig, "port")
    api_key: str | None = like(GatewayConfig, "api_key")
    enable_admin: bool = like(GatewayConfig, "enable_admin")
    admin_key: str | None = like(GatewayConfig, "admin_key")
    curve_dir: str | None = like(ProcessSettings, "curve_dir")
    sample: bool = setting(True, "Stream one sample completion to the terminal when ready.", group="process")
    ready_timeout_s: float = setting(
        600.0, "Seconds that the workers get to load the model and be ready.", group="process", ge=1, le=86400
    )
    log_level: str = like(ProcessSettings, "log_level")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_host("--host", self.host)
        check_admin(self.host, self.enable_admin, self.api_key, self.admin_key)
        check_swap(self.preemption_mode, self.swap_space)
        if self.kv_link is not None:
            LinkSpec.parse(self.kv_link)
        if self.is_colocated and self.default_mode == "disaggregated":
            raise SettingsError("--default-mode disaggregated needs a prefill worker, and --prefill is 0")
        if self.is_colocated and (self.kv_link or self.kv_checksum or self.kv_wire_dtype != "auto"):
            raise SettingsError("--kv-link, --kv-checksum, --kv-wire-dtype need a prefill worker, and --prefill is 0")

    @property
    def can_switch(self) -> bool:
        """Whether workers can be given the other role: only where there is a way to say so."""
        return self.enable_admin or self.admin_key is not None

    @property
    def is_colocated(self) -> bool:
        """Whether there is no prefill worker, and never will be."""
        return self.prefill == 0 and not self.can_switch
