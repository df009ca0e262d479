"""Settings of an engine that runs in the caller's own process. Whoever gives them, as flags or as keywords of an `LLM`,
is told in his own words what is wrong with them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.errors import EngineError
from kvtransfer.errors import SettingsError
from kvtransfer.settings import Option, ProcessSettings, Settings, like, options, setting


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(Settings):
    """The engine's own settings, without those of a worker among others. Wrong types are errors too: these values come
    from programs as well as from flags."""

    model: str = like(EngineConfig, "model")
    dtype: str = like(EngineConfig, "dtype")
    max_model_len: int | None = like(EngineConfig, "max_model_len")
    default_seed: int | None = like(ProcessSettings, "default_seed")
    device: str = like(EngineConfig, "device")
    kernels: str = like(EngineConfig, "kernels")
    enforce_eager: bool = like(ProcessSettings, "enforce_eager")
    cpu_threads: int | None = like(EngineConfig, "cpu_threads")
    max_num_seqs: int = like(EngineConfig, "max_num_seqs")
    max_num_batched_tokens: int = setting(
        512,
        "Prompt tokens in one step, beside the requests that are generating.",
        group="batching and memory",
        ge=1,
        le=1 << 20,
    )
    block_size: int = like(EngineConfig, "block_size")
    enable_prefix_caching: bool = like(EngineConfig, "enable_prefix_caching")
    kv_cache_dtype: str = like(EngineConfig, "kv_cache_dtype")
    gpu_memory_utilization: float = like(EngineConfig, "gpu_memory_utilization")
    kv_cache_gib: float = like(EngineConfig, "kv_cache_gib")

    def __post_init__(self) -> None:
        for option in options(type(self)):
            _check_type(option, getattr(self, option.name))
        super().__post_init__()

    @property
    def engine(self) -> EngineConfig:
        """What `engine.assembly.assemble` takes."""
        shared = {option.name for option in options(EngineConfig)} & {option.name for option in options(OfflineConfig)}
        values: dict[str, Any] = {name: getattr(self, name) for name in shared}
        return EngineConfig(**values)

    @property
    def max_step_tokens(self) -> int:
        """Most tokens in one step: prompts' and one of each request that is generating."""
        return self.max_num_seqs + self.max_num_batched_tokens


@contextmanager
def called_by_keyword() -> Iterator[None]:
    """What is raised meanwhile calls settings as a program does, `max_model_len`, and not as flags and variables."""
    try:
        yield
    except (SettingsError, EngineError) as error:
        error.args = (_by_keyword(str(error)),)
        raise


def _by_keyword(message: str) -> str:
    for option in options(OfflineConfig):
        # Not where it stands in a path or in quotes: that is a value.
        label = rf"(?<![^\s(]){option.flag}( \({option.variable}\))?(?![\w-])"
        message = re.sub(label, _keyword(option), message)
    return message


def _keyword(option: Option) -> str:
    return option.about.flag or option.name


def _check_type(option: Option, value: Any) -> None:
    """Raises SettingsError. A whole number is as good as a number with a point, and True is no number."""
    if value is None and option.optional:
        return
    kinds = (int, float) if option.kind is float else (option.kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and option.kind is not bool):
        raise SettingsError(f"{_keyword(option)} must be of type {option.kind.__name__}, not {type(value).__name__}")
