"""From the settings of `kvsplice serve` to the command line of each process. Starts nothing.

gateway      HTTP on --host:--port, control on a free loopback port
prefill-0..  dial the control port
decode-0..   dial the control port, take KV on free loopback ports

Where admin calls may switch roles, workers are called worker-0.., first those that begin with prefill.

Where there are enough cores, prefill workers on a CPU have some of their own, and all other processes share the rest.
Left to itself, the kernel wakes the gateway and all that is small on prefill's core, which is idle between prompts, and
leaves them there when the next prompt comes: on two cores a long one then takes a third longer. Decode hardly notices.
Workers that may switch their roles have no cores of their own.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from decode.config import DecodeConfig
from gateway.config import GatewayConfig
from kvtransfer.addresses import endpoint
from kvtransfer.settings import Settings, options, to_flags
from kvtransfer.worker_facts import Role
from launcher.config import ServeConfig
from launcher.gpus import VISIBLE
from launcher.worker_config import WorkerConfig
from prefill.config import PrefillConfig

LOOPBACK: Final = "127.0.0.1"
GATEWAY: Final = "gateway"
"""The gateway's name among the children; that of each other one is its worker's id."""
GATEWAY_DRAIN_S: Final = 1.5
"""What running requests get to end in, seconds. Then the gateway tells clients why theirs has not."""
WORKER_DRAIN_S: Final = 2.0
"""The same on workers: longer, so that the gateway speaks first, and less than the launcher's patience."""
KEY_VARIABLES: Final = {"api_key": "KVSPLICE_API_KEY", "admin_key": "KVSPLICE_ADMIN_KEY"}
"""Keys go through the environment: command lines are public."""


@dataclass(frozen=True)
class ChildSpec:
    """One process to run: the name in front of its log lines, its command line, its environment, and the cores that it
    may use (None: all)."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    cores: frozenset[int] | None = None


@dataclass(frozen=True)
class Machine:
    """What there is to share out: CPU cores by number, GPUs (as CUDA_VISIBLE_DEVICES takes them), free ports."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    http_port: int
    control_port: int


def served_names(config: ServeConfig) -> tuple[str, ...]:
    """Names that requests may use, as the gateway alone would choose them."""
    return GatewayConfig(model=config.model, served_model_name=config.served_model_name).served_names


def plan(config: ServeConfig, model: Path, machine: Machine, environ: Mapping[str, str]) -> list[ChildSpec]:
    """The gateway and all workers, in the order of starting."""
    roles = [Role.PREFILL] * config.prefill + [Role.DECODE] * config.decode
    workers = [_worker(config, model, machine, environ, roles, index) for index in range(len(roles))]
    cores = _cores(config, machine)
    return [replace(child, cores=cores(child.name)) for child in (_gateway(config, model, machine, environ), *workers)]


def _threads(config: ServeConfig, machine: Machine) -> int:
    """Threads that each worker computes with."""
    return config.cpu_threads or max(1, len(machine.cores) // (config.prefill + config.decode))


def _cores(config: ServeConfig, machine: Machine) -> Callable[[str], frozenset[int] | None]:
    """Which cores each child may use, by its name."""
    threads = _threads(config, machine)
    num_reserved = threads * config.prefill
    enough = num_reserved + threads * config.decode <= len(machine.cores)
    if machine.gpus or not config.reserve_cores or not config.prefill or not enough or config.can_switch:
        return lambda name: None
    reserved = machine.cores[-num_reserved:]
    shares = {f"prefill-{i}": frozenset(reserved[i * threads : (i + 1) * threads]) for i in range(config.prefill)}
    rest = frozenset(machine.cores[:-num_reserved])
    return lambda name: shares.get(name, rest)


def _gateway(config: ServeConfig, model: Path, machine: Machine, environ: Mapping[str, str]) -> ChildSpec:
    values = _shared(config, GatewayConfig) | {
        "model": str(model),
        "served_model_name": served_names(config),
        "port": machine.http_port,
        "control_host": LOOPBACK,
        "control_port": machine.control_port,
        "shutdown_timeout_s": GATEWAY_DRAIN_S,
        "default_mode": "local" if config.is_colocated else config.default_mode,
        **dict.fromkeys(KEY_VARIABLES),
    }
    secret = {variable: key for name, variable in KEY_VARIABLES.items() if (key := getattr(config, name))}
    return ChildSpec(GATEWAY, _command("gateway", GatewayConfig, values), {**environ, **secret})


def _worker(
    config: ServeConfig, model: Path, machine: Machine, environ: Mapping[str, str], roles: Sequence[Role], index: int
) -> ChildSpec:
    command, config_class = ("worker", WorkerConfig) if config.can_switch else _FIXED[roles[index]]
    number = index if config.can_switch else roles[:index].count(roles[index])
    name = f"{command}-{number}"
    values = _shared(config, config_class) | {
        "model": str(model),
        "worker_id": name,
        "gateway": (endpoint(LOOPBACK, machine.control_port),),
        "cpu_threads": _threads(config, machine),
        "shutdown_timeout_s": WORKER_DRAIN_S,
        "curve_name": command if config.curve_dir else None,
        "role": roles[index].value,
    }
    if command != Role.PREFILL.value:
        values |= {"kv_host": LOOPBACK, "kv_port": 0, "kv_advertise_host": LOOPBACK}
    own = {key: value for key, value in environ.items() if key not in KEY_VARIABLES.values()}
    if machine.gpus:
        own[VISIBLE] = machine.gpus[index % len(machine.gpus)]
        sharers = len(range(index % len(machine.gpus), len(roles), len(machine.gpus)))
        values["gpu_memory_utilization"] = config.gpu_memory_utilization / sharers
    return ChildSpec(name, _command(command, config_class, values), own)


def _shared(config: ServeConfig, config_class: type[Settings]) -> dict[str, Any]:
    """The settings that `serve` and a role have under the same name."""
    theirs = {option.name for option in options(config_class)}
    return {option.name: getattr(config, option.name) for option in options(ServeConfig) if option.name in theirs}


_FIXED: Final[Mapping[Role, tuple[str, type[Settings]]]] = {
    Role.PREFILL: ("prefill", PrefillConfig),
    Role.DECODE: ("decode", DecodeConfig),
}
"""The command and settings of a worker that keeps its role."""


def _command(role: str, config_class: type[Settings], values: Mapping[str, Any]) -> tuple[str, ...]:
    return (sys.executable, "-u", "-m", "launcher.child", role, *to_flags(config_class, values))
