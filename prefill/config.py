"""Settings of a prefill worker."""

from dataclasses import dataclass

from engine.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(EngineConfig):
    """An engine that turns prompts into KV, a chunk at a time."""
