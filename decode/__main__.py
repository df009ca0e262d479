"""`python -m decode` and `kvsplice decode`: one decode worker."""

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from decode.config import DecodeConfig
from decode.scheduler import DecodeJob, DecodeLimits, DecodeScheduler
from decode.staged_sink import StagedSink
from decode.worker import DecodeRole, PoolSink
from engine.assembly import Engine, assemble, introduce, key_name_of, worker_id_of
from engine.cuda_lane import CudaLane
from engine.grammar_door import GrammarDoor
from engine.startup import failures_in_one_line
from engine.swap_space import SwapSpace
from kvtransfer.addresses import endpoint
from kvtransfer.channel import ControlClient
from kvtransfer.command_line import parse
from kvtransfer.control import GatewayLinks, LinkTiming
from kvtransfer.curve import CurveKeys, load_keys
from kvtransfer.faults import witness_of
from kvtransfer.intake import KvSink
from kvtransfer.kv_channel import KvListener
from kvtransfer.logs import configure_logging
from kvtransfer.mailbox import Mailbox
from kvtransfer.receive_commands import ReceiverLimits
from kvtransfer.receiver import KvReceiver
from kvtransfer.signals import exit_on_signals, run_and_leave
from kvtransfer.sockets import endpoint_port
from kvtransfer.steady_memory import settle_memory
from kvtransfer.worker import Wake, Worker, WorkerEvent, stop_on_signals
from kvtransfer.worker_facts import Role
from launcher.default_model import resolve_model

PROG = "kvsplice decode"
DESCRIPTION = "Takes KV cache from prefill workers, or computes it, and generates in one continuous batch."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a decode worker until it is told to stop; returns the exit code."""
    config = parse(DecodeConfig, sys.argv[1:] if argv is None else argv, os.environ, PROG, DESCRIPTION)
    configure_logging(config.log_level)
    exit_on_signals()
    with failures_in_one_line(PROG):
        worker_id = worker_id_of(config, Role.DECODE)
        keys = load_keys(config.curve_dir, key_name_of(config, Role.DECODE), worker_id)
        listener = KvListener(config.kv_host, config.kv_port, keys)
        engine = assemble(
            config,
            resolve_model(config.model),
            config.max_num_batched_tokens,
            record_decode=not config.enforce_eager,
            swap_gib=config.swap_gib,
        )
        settle_memory()
        with closing(engine.grammars):
            return build(config, engine, listener, keys).run()


def build(
    config: DecodeConfig, engine: Engine, listener: KvListener, keys: CurveKeys | None, *, can_switch: bool = False
) -> Worker:
    """The worker around an engine, not started yet; signals go to its loop from here on. `can_switch`: whoever runs it
    builds another role when it ends for that."""
    inbox: Mailbox[WorkerEvent] = Mailbox()
    kv_endpoint = endpoint(config.kv_dial_host, endpoint_port(listener.endpoint))
    hello = introduce(config, Role.DECODE, engine, kv_endpoint, can_switch=can_switch)
    scheduler = _scheduler(config, engine)
    receiver = KvReceiver(
        listener=listener,
        identity=(hello.fingerprint, hello.layout),
        generation=hello.generation,
        sink=_sink(engine, scheduler),
        limits=ReceiverLimits(config.kv_window_mib << 20, config.lease_s),
        events=inbox,
    )
    dial = partial(ControlClient, security=keys)
    timing = LinkTiming(config.heartbeat_interval_s, config.gateway_dead_after_s)
    links = GatewayLinks(hello, config.gateway, timing, inbox, config.max_waiting, dial)
    stop_on_signals(inbox)
    door: GrammarDoor[DecodeJob] = GrammarDoor(engine.grammars, engine.masks, wake=lambda: inbox.put(Wake()))
    role = DecodeRole(engine, scheduler, receiver, witness=witness_of(config.fault), door=door)
    return Worker(role, links, inbox, config.shutdown_timeout_s, switches_from=Role.DECODE if can_switch else None)


def _scheduler(config: DecodeConfig, engine: Engine) -> DecodeScheduler:
    limits = DecodeLimits(
        max_num_prefill_tokens=config.max_num_prefill_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=engine.max_model_len,
        lease=config.room_wait_s,
        queue_timeout=config.queue_timeout_s,
        # Prefill gives a request up itself, a lease earlier: its word says more.
        offer_timeout=config.queue_timeout_s + config.lease_s,
        max_num_partial_prefills=config.max_num_partial_prefills or 1,
    )
    num_swap_blocks = engine.mover.num_blocks
    swap = SwapSpace(num_swap_blocks, config.block_size) if num_swap_blocks else None
    return DecodeScheduler(engine.pool, config.queue_rules, limits, engine.eos_token_ids, swap)


def _sink(engine: Engine, scheduler: DecodeScheduler) -> KvSink:
    """Where KV goes: on a GPU beside the computation."""
    if engine.device.type == "cuda":
        return StagedSink(engine, scheduler, CudaLane(engine.device))
    return PoolSink(engine, scheduler)


if __name__ == "__main__":
    run_and_leave(main)
