"""Settings of `kvsplice generate`."""

from dataclasses import dataclass
from typing import Any, Final

from engine.offline_config import OfflineConfig
from kvtransfer.request_parts import MAX_TOKEN_ID
from kvtransfer.settings import ProcessSettings, like, setting

STANDARD: Final = "-"
SAMPLING_FIELDS: Final = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(OfflineConfig):
    """An engine, what it reads and writes, and how prompts are continued that do not say it themselves."""

    input: str = setting(
        STANDARD, "File of prompts, one JSON object a line; - is standard input.", group="files", metavar="FILE"
    )
    output: str = setting(
        STANDARD,
        "File for results, one JSON object a line. What it holds already is not computed again; - is standard output.",
        group="files",
        metavar="FILE",
    )
    progress: bool = setting(True, "Show a progress bar on the terminal.", group="files")
    default_seed: int | None = setting(
        None,
        "With it and its number each line gets a seed of its own, unless it brings one.",
        group="sampling",
        flag="seed",
        ge=-(1 << 63),
        le=(1 << 63) - 1,
        default_text="0",
    )
    max_tokens: int = setting(16, "Most tokens of an output.", group="sampling", ge=1, le=1 << 53)
    temperature: float = setting(1.0, "Of draws; 0 takes the most likely token.", group="sampling", ge=0, le=2)
    top_p: float = setting(1.0, "Draw from the likeliest tokens of this mass.", group="sampling", ge=1e-9, le=1)
    top_k: int = setting(0, "Draw from so many tokens; 0: from all.", group="sampling", ge=-1, le=MAX_TOKEN_ID)
    min_p: float = setting(
        0.0, "Draw from tokens with this share of the likeliest one's probability.", group="sampling", ge=0, le=1
    )
    repetition_penalty: float = setting(
        1.0, "Divides logits of tokens that were there before.", group="sampling", ge=1e-9, le=1e4
    )
    presence_penalty: float = setting(
        0.0, "Taken from logits of tokens that are in the output.", group="sampling", ge=-2, le=2
    )
    frequency_penalty: float = setting(
        0.0, "Taken from logits of tokens for each time in the output.", group="sampling", ge=-2, le=2
    )
    ignore_eos: bool = setting(False, "Go on behind the model's end of text.", group="sampling")
    log_level: str = like(ProcessSettings, "log_level")

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling fields of lines that do not set them."""
        return {name: getattr(self, name) for name in SAMPLING_FIELDS}

    @property
    def base_seed(self) -> int:
        return 0 if self.default_seed is None else self.default_seed
