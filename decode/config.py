"""Settings of a decode worker."""

from dataclasses import dataclass
from typing import Final

from engine.config import EngineConfig
from kvtransfer.addresses import check_host, check_private_bind, is_wildcard
from kvtransfer.errors import SettingsError
from kvtransfer.settings import ProcessSettings, like, setting

ROOM_SHARE: Final = 0.9
DEFAULT_SWAP_GIB: Final = 4.0


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(EngineConfig):
    """An engine that takes KV from prefill workers and generates."""

    kv_host: str = setting("127.0.0.1", "Address to take KV on.", group="network", metavar="HOST")
    kv_port: int = setting(0, "Port to take KV on; 0 takes any free one.", group="network", ge=0, le=65535)
    kv_advertise_host: str | None = setting(
        None,
        "Host that prefill workers dial; needed when --kv-host means all interfaces.",
        group="network",
        metavar="HOST",
        default_text="the same as --kv-host",
    )
    insecure: bool = like(ProcessSettings, "insecure")
    kv_window_mib: int = setting(
        16, "KV of one request that may be on its way at once, in MiB.", group="network", ge=1, le=4096
    )

    max_num_prefill_tokens: int = setting(
        256,
        "Prompt tokens in one step that this worker computes itself, beside the running requests: of local prompts, "
        "and of requests that had lost their blocks. Smaller keeps the others' tokens coming evenly.",
        group="batching and memory",
        ge=1,
        le=1 << 20,
    )
    preemption_mode: str = setting(
        "recompute",
        "What becomes of the KV of a request that loses its blocks to others: computed again, or swapped to the host's "
        "memory (--swap-space), and computed again only if that is full.",
        group="batching and memory",
        choices=("recompute", "swap"),
    )
    swap_space: float | None = setting(
        None,
        "With --preemption-mode swap: size of the host's memory for swapped KV in GiB; pinned on a GPU.",
        group="batching and memory",
        ge=0.001,
        le=1 << 16,
        default_text=f"{DEFAULT_SWAP_GIB:g}",
    )
    enforce_eager: bool = like(ProcessSettings, "enforce_eager")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_swap(self.preemption_mode, self.swap_space)
        check_private_bind("--kv-host", self.kv_host, self.curve_dir, self.insecure)
        check_host("--kv-advertise-host", self.kv_dial_host)
        if is_wildcard(self.kv_dial_host):
            raise SettingsError(f"--kv-advertise-host is needed: prefill workers cannot dial {self.kv_dial_host}")

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens in one step."""
        return self.max_num_seqs + self.max_num_prefill_tokens

    @property
    def swap_gib(self) -> float:
        """GiB of the host's memory for swapped KV."""
        return 0.0 if self.preemption_mode == "recompute" else self.swap_space or DEFAULT_SWAP_GIB

    @property
    def room_wait_s(self) -> float:
        """Longest wait for room. It ends before the lease of the prefill worker that holds the KV meanwhile: the client
        is to hear of an overload, not of a transfer that has failed."""
        return ROOM_SHARE * self.lease_s

    @property
    def kv_dial_host(self) -> str:
        """The host that prefill workers dial."""
        return self.kv_advertise_host or self.kv_host


def check_swap(preemption_mode: str, swap_space: float | None) -> None:
    """Raises SettingsError for a swap space that nothing would use."""
    if swap_space is not None and preemption_mode != "swap":
        raise SettingsError(f"--swap-space is for --preemption-mode swap, and it is {preemption_mode}")
