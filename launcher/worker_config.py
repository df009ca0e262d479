"""Settings of a worker that can switch its role."""

import os
import socket
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from decode.config import DecodeConfig
from engine.config import EngineConfig, default_worker_id
from kvtransfer.errors import SettingsError
from kvtransfer.link_name import speaks_for
from kvtransfer.settings import like, options, setting
from kvtransfer.worker_facts import Role
from prefill.config import PrefillConfig

WORKER_KEY: Final = "worker"
"""Name of such a worker's key, and the beginning of its id, unless told otherwise."""

_RoleConfig = TypeVar("_RoleConfig", PrefillConfig, DecodeConfig)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(EngineConfig):
    """One engine for either role, with the settings of both: each role goes by its own, whenever the worker has it."""

    role: str = setting(
        "decode",
        "The role to begin with; a gateway that takes admin calls can switch it.",
        group="process",
        choices=tuple(role.value for role in Role),
    )
    curve_name: str | None = setting(
        None,
        "Name of this worker's own key; its worker id must be this name, or begin with it and a dash.",
        group="network",
        metavar="NAME",
        default_text=WORKER_KEY,
    )
    worker_id: str | None = setting(
        None,
        "Name of this worker, unique in the cluster; it may not begin with the name of a role.",
        group="process",
        default_text="made of worker, host and process id",
    )
    max_num_batched_tokens: int = like(PrefillConfig, "max_num_batched_tokens")
    kv_wire_dtype: str = like(PrefillConfig, "kv_wire_dtype")
    kv_link: str | None = like(PrefillConfig, "kv_link")
    kv_checksum: bool = like(PrefillConfig, "kv_checksum")
    kv_host: str = like(DecodeConfig, "kv_host")
    kv_port: int = like(DecodeConfig, "kv_port")
    kv_advertise_host: str | None = like(DecodeConfig, "kv_advertise_host")
    insecure: bool = like(DecodeConfig, "insecure")
    kv_window_mib: int = like(DecodeConfig, "kv_window_mib")
    max_num_prefill_tokens: int = like(DecodeConfig, "max_num_prefill_tokens")
    preemption_mode: str = like(DecodeConfig, "preemption_mode")
    swap_space: float | None = like(DecodeConfig, "swap_space")
    enforce_eager: bool = like(DecodeConfig, "enforce_eager")

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag, name in (("--worker-id", self.own_id), ("--curve-name", self.key_name)):
            named = next((role.value for role in Role if speaks_for(role.value, name)), None)
            if named is not None:
                raise SettingsError(f"{flag}={name} is for a worker that is always {named}; this one can switch")
        self.as_prefill(), self.as_decode()  # what contradicts itself in either is told now

    @property
    def first_role(self) -> Role:
        return Role(self.role)

    @property
    def key_name(self) -> str:
        """Name of the key that this process connects with, if there are keys."""
        return self.curve_name or WORKER_KEY

    @property
    def own_id(self) -> str:
        """The name of this process in the cluster, the same at each call and in each role."""
        return self.worker_id or default_worker_id(self.key_name, socket.gethostname(), os.getpid())

    @property
    def most_batched_tokens(self) -> int:
        """Most tokens in one step of either role."""
        return max(self.as_prefill().max_num_batched_tokens, self.as_decode().max_num_batched_tokens)

    def as_prefill(self) -> PrefillConfig:
        return self._as(PrefillConfig)

    def as_decode(self) -> DecodeConfig:
        return self._as(DecodeConfig)

    def _as(self, config_class: type[_RoleConfig]) -> _RoleConfig:
        values: dict[str, Any] = {option.name: getattr(self, option.name) for option in options(config_class)}
        return config_class(**(values | {"worker_id": self.own_id}))
