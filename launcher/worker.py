"""`kvsplice worker`: one engine that is a prefill or a decode worker, and the other one when a gateway says so.

    load the model once --> a worker of the first role --> SwitchRole: drained, Goodbye, all blocks back --+
                                 ^                                                                         |
                                 +---- a worker of the other role, another start of the same worker id <---+

Weights, KV pool and its prefix cache stay; scheduler, sockets and the threads that move KV are made anew. This is the
only code that holds both roles: they know nothing of each other.
"""

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from decode.__main__ import build as build_decode
from engine.assembly import Engine, assemble
from engine.startup import failures_in_one_line
from kvtransfer.command_line import parse
from kvtransfer.curve import CurveKeys, load_keys
from kvtransfer.errors import SettingsError
from kvtransfer.kv_channel import KvListener
from kvtransfer.logs import configure_logging
from kvtransfer.signals import exit_on_signals
from kvtransfer.steady_memory import settle_memory
from kvtransfer.worker import StopRequested, Worker
from kvtransfer.worker_facts import Role
from launcher.default_model import resolve_model
from launcher.worker_config import WorkerConfig
from prefill.__main__ import build as build_prefill

logger = logging.getLogger(__name__)

PROG = "kvsplice worker"
DESCRIPTION = (
    "Prefills or decodes, and switches between the two when a gateway that takes admin calls says so: POST "
    "/admin/workers/ID/role. The model stays loaded. Flags of both roles apply, each while the worker has that role."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a worker until it is told to stop; returns the exit code."""
    config = parse(WorkerConfig, sys.argv[1:] if argv is None else argv, os.environ, PROG, DESCRIPTION)
    configure_logging(config.log_level)
    exit_on_signals()
    with failures_in_one_line(PROG):
        keys = load_keys(config.curve_dir, config.key_name, config.own_id)
        listener = _listen(config, keys, config.first_role)
        engine = assemble(
            config,
            resolve_model(config.model),
            config.most_batched_tokens,
            record_decode=not config.enforce_eager,
            swap_gib=config.as_decode().swap_gib,
        )
        settle_memory()
        with closing(engine.grammars):
            return _Roles(config, engine, keys).run(config.first_role, listener)


@dataclass(frozen=True)
class _Roles:
    """Makes workers of either role around one engine, one after the other."""

    config: WorkerConfig
    engine: Engine
    keys: CurveKeys | None

    def run(self, role: Role, listener: KvListener | None) -> int:
        """Until one of them is told to stop, or fails; its exit code."""
        worker = self._build(role, listener)
        while True:
            exit_code = worker.run()
            if worker.next_role is None:
                return exit_code
            if worker.role.is_alive() or worker.links.is_alive():
                logger.error("a thread of the %s worker does not end; giving up", role.value)
                return 1
            role, listener = self._next(worker.next_role, role)
            worker, former = self._build(role, listener), worker
            _pass_on_signals(former, worker)

    def _build(self, role: Role, listener: KvListener | None) -> Worker:
        if listener is None:
            assert role is Role.PREFILL, "a decode worker listens"
            return build_prefill(self.config.as_prefill(), self.engine, self.keys, can_switch=True)
        return build_decode(self.config.as_decode(), self.engine, listener, self.keys, can_switch=True)

    def _next(self, wanted: Role, former: Role) -> tuple[Role, KvListener | None]:
        """The role to go on with, and what it listens on: the former one if the port for KV is somebody else's now."""
        try:
            return wanted, _listen(self.config, self.keys, wanted)
        except SettingsError as error:
            logger.error("can't become a %s worker, going on as before: %s", wanted.value, error)
            return former, None


def _listen(config: WorkerConfig, keys: CurveKeys | None, role: Role) -> KvListener | None:
    """Where KV is taken; None for a prefill worker. Raises SettingsError."""
    return KvListener(config.kv_host, config.kv_port, keys) if role is Role.DECODE else None


def _pass_on_signals(former: Worker, worker: Worker) -> None:
    """A signal that came between the two has reached the one that is over."""
    for event in former.inbox.drain():
        if isinstance(event, StopRequested):
            worker.inbox.put(event)
    former.inbox.close()
