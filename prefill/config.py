"""Settings of a prefill worker."""

from dataclasses import dataclass

from engine.config import EngineConfig
from kvtransfer.emulated_link import LinkSpec
from kvtransfer.settings import setting


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(EngineConfig):
    """An engine that turns prompts into KV, a chunk at a time."""

    max_num_batched_tokens: int = setting(
        512,
        "Prompt tokens in one step: larger is more throughput, smaller lets short prompts pass long ones sooner.",
        group="batching and memory",
        ge=1,
        le=1 << 20,
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_link is not None:
            LinkSpec.parse(self.kv_link)

    @property
    def link(self) -> LinkSpec | None:
        """What `kv_link` says."""
        return None if self.kv_link is None else LinkSpec.parse(self.kv_link)
