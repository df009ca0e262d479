"""`kvsplice serve`: all roles on one machine, ready when it says so, gone when it stops.

1. Check the port, find or fetch the model, share out cores, GPUs and ports.
2. Start the gateway and the workers as processes of their own, and show their logs under their names.
3. Ask the gateway until it is ready and gives requests to each of the workers. A process that ends before that is the
   end of it all: exit code 1, or 2 with its own words if it has found its settings wrong.
4. Say where it is, with a line to paste, and stream one completion to the terminal.
5. Restart what dies, a bounded number of times.
6. On Ctrl-C, SIGTERM or SIGHUP: SIGTERM to all, SIGKILL to what is left after 4 s, exit code 0.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from launcher.config import ServeConfig
from launcher.default_model import resolve_model
from launcher.errors import LaunchError
from launcher.gpus import visible_gpus
from launcher.plan import GATEWAY, LOOPBACK, ChildSpec, Machine, plan, served_names
from launcher.ports import dial_host, usable_port
from launcher.probe import GatewayProbe, has_chat_template
from launcher.supervisor import Supervisor
from launcher.terminal import Terminal

TICK_S: Final = 0.2


def serve(config: ServeConfig, environ: Mapping[str, str]) -> int:
    """Runs until told to stop; returns the exit code. Raises SettingsError for what can be told before the start, and
    for what a role finds wrong at its own."""
    started_at = time.monotonic()
    machine = _machine(config, environ)
    model = resolve_model(config.model, environ=environ)
    terminal = Terminal()
    children = plan(config, model, machine, environ)
    probe = _probe(config, machine, model, children)
    supervisor = Supervisor(children, terminal)
    stop = _stop_on_signals()
    terminal.line(f"kvsplice: {_starting(config)}")
    try:
        supervisor.start()
        if wait_until_ready(supervisor, probe, stop, started_at + config.ready_timeout_s):
            _announce(probe, time.monotonic() - started_at)
            if config.sample:
                with terminal.held():
                    _show_sample(probe, stop)
            supervise(supervisor, stop, terminal)
        return 0
    except LaunchError as error:
        terminal.line(f"kvsplice: error: {error}")
        return 1
    finally:
        terminal.line("kvsplice: stopping...")
        supervisor.stop()
        terminal.line("kvsplice: stopped")


def wait_until_ready(supervisor: Supervisor, probe: GatewayProbe, stop: threading.Event, deadline: float) -> bool:
    """True when the gateway has all workers, False when told to stop. Raises LaunchError if a process ends or
    `deadline` (monotonic seconds) passes."""
    while not stop.wait(TICK_S):
        supervisor.check_all_alive()
        ready, reason = probe.health()
        if ready:
            return True
        if time.monotonic() > deadline:
            raise LaunchError(f"not ready in time (--ready-timeout-s): {reason}")
    return False


def supervise(supervisor: Supervisor, stop: threading.Event, terminal: Terminal) -> None:
    """Restarts what dies until told to stop. Raises LaunchError when a process dies too often."""
    while not stop.wait(TICK_S):
        for line in supervisor.tick(time.monotonic()):
            terminal.line(f"kvsplice: {line}")


def _machine(config: ServeConfig, environ: Mapping[str, str]) -> Machine:
    return Machine(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        gpus=visible_gpus(config.device, environ),
        http_port=usable_port(config.host, config.port),
        control_port=usable_port(LOOPBACK, 0),
    )


def _probe(config: ServeConfig, machine: Machine, model: Path, children: Sequence[ChildSpec]) -> GatewayProbe:
    return GatewayProbe(
        host=dial_host(config.host),
        port=machine.http_port,
        model=served_names(config)[0],
        api_key=config.api_key,
        chat=has_chat_template(model),
        workers=tuple(child.name for child in children if child.name != GATEWAY),
    )


def _stop_on_signals() -> threading.Event:
    """An event that Ctrl-C, SIGTERM and SIGHUP set from now on, instead of ending this process."""
    stop = threading.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, lambda *_: stop.set())
    return stop


def _starting(config: ServeConfig) -> str:
    noun = "worker" if config.decode == 1 else "workers"
    if config.is_colocated:
        return f"starting {config.decode} {noun} for prefill and decode..."
    return f"starting {config.prefill} prefill and {config.decode} decode {noun}..."


def _announce(probe: GatewayProbe, seconds: float) -> None:
    print(f"\nkvsplice is ready at {probe.url} ({seconds:.1f} s). Try it:\n\n{probe.curl_line}\n", flush=True)


def _show_sample(probe: GatewayProbe, stop: threading.Event) -> None:
    """Streams one completion. In a thread, so that Ctrl-C is heard at once."""
    sample = threading.Thread(target=_print_sample, args=(probe,), name="sample", daemon=True)
    sample.start()
    while sample.is_alive() and not stop.is_set():
        sample.join(TICK_S)


def _print_sample(probe: GatewayProbe) -> None:
    try:
        print(probe.prompt, end=" " if probe.chat else "", flush=True)
        for text in probe.sample():
            print(text, end="", flush=True)
        print("\n\nCtrl-C stops it.", flush=True)
    except LaunchError as error:
        print(f"\nkvsplice: the sample completion failed: {error}", file=sys.stderr, flush=True)
