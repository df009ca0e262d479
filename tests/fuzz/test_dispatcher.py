"""The gateway's control plane, spoken to by workers that lie: no message of theirs trips the gateway, which would log
an exception, and each client gets exactly one end."""

import asyncio
import logging

from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster import Cluster, ClusterSettings
from gateway.dispatch import DispatchSettings
from gateway.flights import Flights
from gateway.retired import RetiredStarts
from kvtransfer.codec import encode
from kvtransfer.messages import PrefillRequest, StepOutput, decode_from_gateway, decode_from_worker
from kvtransfer.request_parts import EndReason, RequestOutput
from tests.fuzz.hostile import NUMBERS, QUICK, TREES, VALUES, frame_of, spoilt, tree_of
from tests.gateway.cluster_world import beat, hello, step, world
from tests.kvtransfer.samples import FROM_GATEWAY, FROM_WORKER

LIARS = ("prefill-1", "decode-1", "stranger")
LIMITS = ClusterSettings(max_workers=8, dead_after_s=2.0)
DEADLINES = DispatchSettings(tick_s=3600, request_timeout_s=20.0, first_token_timeout_s=10.0, stream_buffer_tokens=16)
FIELDS = st.sampled_from(
    ["generation", "sequence", "progress", "role", "kv_endpoint", "introduction", "limits", "load"]
)
IDENTITY = [hello(name) for name in LIARS] + [beat(), step()]
CHANGES = st.dictionaries(FIELDS, VALUES, max_size=1)
OWN = st.builds(lambda message, changes: tree_of(message) | changes, st.sampled_from(IDENTITY), CHANGES)
SAID = OWN | spoilt(st.sampled_from(FROM_WORKER)) | spoilt(st.sampled_from(FROM_GATEWAY)) | TREES
TOKENS = st.lists(st.sampled_from([0, 1, 5, 99, 100, (1 << 31) - 1]), max_size=20)
LIES = st.tuples(st.sampled_from([0, 0, 1, 1]) | NUMBERS, TOKENS, st.none() | st.sampled_from(EndReason))
STEPS = st.one_of(
    st.tuples(st.just("say"), st.sampled_from(LIARS), SAID),
    st.tuples(st.just("say"), st.sampled_from(LIARS), SAID),
    st.tuples(st.just("join"), st.sampled_from(LIARS), st.none()),
    st.tuples(st.just("ask"), st.integers(1, 12), st.booleans()),
    st.tuples(st.just("output"), st.sampled_from(LIARS), LIES),
    st.tuples(st.just("output"), st.sampled_from(LIARS), LIES),
    st.tuples(st.just("pass"), st.sampled_from([0.5, 1.0, 3.0]), st.none()),
)


class NoExceptions(logging.Handler):
    """Keeps what was logged with a traceback: each is a bug of ours that a message has tripped."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list = []

    def emit(self, record) -> None:
        if record.exc_info:
            self.records.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


@QUICK
@given(steps=st.lists(STEPS, max_size=40))
def test_no_sequence_of_messages_trips_the_gateway(steps):
    watch = NoExceptions()
    logging.getLogger("gateway").addHandler(watch)
    try:
        asyncio.run(scenario(steps))
    finally:
        logging.getLogger("gateway").removeHandler(watch)
    assert watch.records == []


async def scenario(steps) -> None:
    async with world("prefill-0", "decode-0", cluster=LIMITS, settings=DEADLINES) as it:
        # Liars say Hello twice; the fake would take the second Welcome for a new count, which no worker does.
        it.control._without_number = lambda worker_id, message: message
        clients = []
        for name, whom, what in steps:
            await play(it, clients, name, whom, what)
            check(it)
        await it.pass_time(25.0)
        assert all(client.task.done() for client, _ in clients), "a client is still waiting"
        for client, max_tokens in clients:
            assert len(client.tokens) <= max_tokens
            assert (client.finish is None) is not (client.error is None), "no end, or two"
        it.assert_empty()


async def play(it, clients, name, whom, what) -> None:
    match name:
        case "say":
            it.control.inbox.put_nowait((whom, decode_from_worker.or_error([frame_of(what)])))
            await it.settle()
        case "join":
            it.said[whom] = ("g1", 0)
            await it.hear(whom, hello(whom))
            await it.hear(whom, beat())
        case "ask":
            clients.append((await it.ask(max_tokens=whom), whom))
        case "output":
            await lie(it, whom, *what)
        case "pass":
            await it.pass_time(whom)


async def lie(it, worker_id, start, tokens, reason) -> None:
    """About a request that this worker may or may not have been given."""
    given = [message.request for _, message in it.control.sent if isinstance(message, PrefillRequest)]
    spec = given[-1] if given else None
    name, attempt = (spec.request_id, spec.attempt) if spec else ("nobody", 0)
    end = None if reason is None else {"reason": reason.value}
    output = {"request_id": name, "attempt": attempt, "start": start, "token_ids": tokens, "end": end}
    number = it.said.get(worker_id, ("g1", 0))[1] + 1
    it.said[worker_id] = ("g1", number)
    tree = {"type": "StepOutput", "generation": "g1", "sequence": number, "outputs": [output]}
    it.control.inbox.put_nowait((worker_id, decode_from_worker.or_error([frame_of(tree)])))
    await it.settle()


def check(it) -> None:
    it.dispatcher.check_integrity()
    assert len(it.cluster.workers) <= LIMITS.max_workers
    assert len(it.cluster._retired) <= RetiredStarts.MAX_RETIRED
    assert len(it.dispatcher._flights._late_cancels) <= Flights.MAX_LATE_CANCELS_PER_TICK
    for _, message in it.control.sent[-4:]:
        assert decode_from_gateway(encode(message)) == message, "the worker could not read this"


def test_the_watch_sees_a_trip(monkeypatch):
    """The negative control."""
    monkeypatch.setattr(Cluster, "receive", lambda *args: 1 / 0)
    watch = NoExceptions()
    logging.getLogger("gateway").addHandler(watch)
    try:
        asyncio.run(scenario([("ask", 3, True)]))
    finally:
        logging.getLogger("gateway").removeHandler(watch)
    assert any("ZeroDivisionError" in record for record in watch.records)


def test_workers_that_come_and_go_fill_no_book():
    """A thousand and more starts of one worker id, and as many ids as are let in."""

    async def run() -> None:
        async with world("prefill-0", cluster=LIMITS) as it:
            for number in range(RetiredStarts.MAX_RETIRED + 50):
                await it.hear("decode-0", hello("decode-0", f"g{number}"))
                await it.hear(f"decode-{10 + number % 40}", hello(f"decode-{10 + number % 40}"))
            assert len(it.cluster.workers) == LIMITS.max_workers
            assert len(it.cluster._retired) == RetiredStarts.MAX_RETIRED
            for number in range(400):
                await it.hear("decode-0", StepOutput("g1073", number + 1, (RequestOutput(f"r{number}", 0, 0, (1,)),)))
            assert len(it.dispatcher._flights._late_cancels) <= Flights.MAX_LATE_CANCELS_PER_TICK

    asyncio.run(run())
