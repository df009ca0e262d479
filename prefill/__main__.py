"""`python -m prefill` and `kvsplice prefill`: one prefill worker."""

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from engine.assembly import Engine, assemble, introduce, key_name_of, worker_id_of
from engine.cuda_lane import CudaLane
from engine.grammar_door import GrammarDoor
from engine.startup import failures_in_one_line
from kvtransfer.channel import ControlClient
from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.command_line import parse
from kvtransfer.control import GatewayLinks, LinkTiming
from kvtransfer.curve import CurveKeys, load_keys
from kvtransfer.faults import witness_of
from kvtransfer.frames import TOGETHER_BYTES, FrameOptions
from kvtransfer.kv_messages import KvHello
from kvtransfer.layout import FP8
from kvtransfer.logs import configure_logging
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import Hello
from kvtransfer.send_commands import SenderTiming
from kvtransfer.send_machine import KvSource
from kvtransfer.sender import KvSender
from kvtransfer.signals import exit_on_signals, run_and_leave
from kvtransfer.steady_memory import settle_memory
from kvtransfer.worker import Wake, Worker, WorkerEvent, stop_on_signals
from kvtransfer.worker_facts import Role
from launcher.default_model import resolve_model
from prefill.config import PrefillConfig
from prefill.scheduler import PrefillJob, PrefillLimits, PrefillScheduler
from prefill.staged_source import StagedSource
from prefill.worker import PoolSource, PrefillRole

PROG = "kvsplice prefill"
DESCRIPTION = "Computes prompts in chunks and ships their KV cache to decode workers while it still computes."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a prefill worker until it is told to stop; returns the exit code."""
    config = parse(PrefillConfig, sys.argv[1:] if argv is None else argv, os.environ, PROG, DESCRIPTION)
    configure_logging(config.log_level)
    exit_on_signals()
    with failures_in_one_line(PROG):
        worker_id = worker_id_of(config, Role.PREFILL)
        keys = load_keys(config.curve_dir, key_name_of(config, Role.PREFILL), worker_id)
        engine = assemble(config, resolve_model(config.model), config.max_num_batched_tokens)
        settle_memory()
        with closing(engine.grammars):
            return build(config, engine, keys).run()


def build(config: PrefillConfig, engine: Engine, keys: CurveKeys | None, *, can_switch: bool = False) -> Worker:
    """The worker around an engine, not started yet; signals go to its loop from here on. `can_switch`: whoever runs it
    builds another role when it ends for that."""
    inbox: Mailbox[WorkerEvent] = Mailbox()
    hello = introduce(config, Role.PREFILL, engine, kv_endpoint=None, can_switch=can_switch)
    limits = PrefillLimits(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=engine.max_model_len,
        queue_timeout=config.queue_timeout_s,
        max_num_partial_prefills=config.max_num_partial_prefills,
    )
    scheduler = PrefillScheduler(engine.pool, config.queue_rules, limits, engine.eos_token_ids)
    staged = StagedSource(engine, scheduler, CudaLane(engine.device)) if engine.device.type == "cuda" else None
    sender = _sender(config, hello, staged or PoolSource(engine, scheduler), inbox, keys)
    dial = partial(ControlClient, security=keys)
    timing = LinkTiming(config.heartbeat_interval_s, config.gateway_dead_after_s)
    links = GatewayLinks(hello, config.gateway, timing, inbox, config.max_waiting, dial)
    stop_on_signals(inbox)
    mark_layer = staged.mark_layer if staged else None
    door: GrammarDoor[PrefillJob] = GrammarDoor(engine.grammars, engine.masks, wake=lambda: inbox.put(Wake()))
    role = PrefillRole(engine, scheduler, sender, mark_layer=mark_layer, witness=witness_of(config.fault), door=door)
    return Worker(role, links, inbox, config.shutdown_timeout_s, switches_from=Role.PREFILL if can_switch else None)


def _sender(
    config: PrefillConfig, hello: Hello, source: KvSource, inbox: Mailbox[WorkerEvent], keys: CurveKeys | None
) -> KvSender:
    wire_dtype = FP8 if config.kv_wire_dtype == "fp8" else None
    return KvSender(
        _kv_hello(hello),
        source,
        inbox,
        SenderTiming(keepalive=config.lease_s / 4, lease=config.lease_s),
        security=keys,
        options=FrameOptions(config.kv_checksum, wire_dtype, TOGETHER_BYTES),
        link=config.link,
    )


def _kv_hello(hello: Hello) -> KvHello:
    return KvHello(PROTOCOL_VERSION, hello.worker_id, hello.generation, hello.fingerprint, hello.layout)


if __name__ == "__main__":
    run_and_leave(main)
