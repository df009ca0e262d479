"""What happens to requests by the thousand does not fill the gateway's log."""

import logging

from gateway.backend import OverloadedError, RequestFailedError
from gateway.cluster import ClusterSettings
from gateway.dispatch import DispatchSettings
from kvtransfer.line_budget import MAX_LOGGED_CHARS, NUM_LINES, PERIOD_S
from kvtransfer.messages import Goodbye
from kvtransfer.request_parts import EndReason
from kvtransfer.worker_facts import LeaveCause
from tests.gateway.cluster_world import hello, world
from tests.gateway.test_dispatch import BOTH, in_loop, started

ALIVE = dict.fromkeys(BOTH, "g1")


def lines_of(caplog) -> list[str]:
    """Of requests; those of workers that come and go are others'."""
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    return [line for line in lines if "worker" not in line.split(" failed")[0].split(" has lost")[0]]


async def turned_away(it) -> None:
    client, spec = await started(it, has_room=False)
    await it.say("decode-0", spec, 0, end=EndReason.OVERLOADED, message="the queue of this worker is full")
    assert type(client.error) is OverloadedError


@in_loop
async def test_a_429_is_one_line(caplog):
    async with world(*BOTH) as it:
        await turned_away(it)
        (line,) = lines_of(caplog)
        assert "failed: " in line
        assert "try again later" in line


@in_loop
async def test_a_thousand_429s_are_a_few_lines_and_a_count(caplog):
    async with world(*BOTH) as it:
        for _ in range(1000):
            await turned_away(it)
        assert len(lines_of(caplog)) == NUM_LINES
        await it.pass_time(PERIOD_S, ALIVE)
        assert lines_of(caplog)[NUM_LINES:] == [f"request failed, overloaded_error: {1000 - NUM_LINES} more times"]
        await it.pass_time(2 * PERIOD_S, ALIVE)
        assert len(lines_of(caplog)) == NUM_LINES + 1
        await turned_away(it)
        assert len(lines_of(caplog)) == NUM_LINES + 2, "few and far between they are told one by one"


@in_loop
async def test_overloads_hide_no_other_failure(caplog):
    async with world(*BOTH) as it:
        for _ in range(2 * NUM_LINES):
            await turned_away(it)
        client, spec = await started(it)
        await it.say("decode-0", spec, 0, end=EndReason.REJECTED, message="no such grammar")
        assert client.error is not None
        assert "no such grammar" in lines_of(caplog)[-1]


@in_loop
async def test_a_worker_that_takes_many_requests_with_it_is_a_few_lines(caplog):
    async with world(*BOTH, settings=DispatchSettings(tick_s=3600)) as it:
        clients = [(await started(it))[0] for _ in range(5 * NUM_LINES)]
        await it.hear("decode-0", Goodbye("g1", "bye"))
        lost = [line for line in lines_of(caplog) if "has lost attempt" in line]
        assert len(lost) == NUM_LINES
        await it.pass_time(60.0, {"prefill-0": "g1"})
        assert all(type(client.error) is RequestFailedError for client in clients)
        lines = lines_of(caplog)
        assert f"attempt lost, decode_lost: {4 * NUM_LINES} more times" in lines
        assert f"request failed, upstream_error: {4 * NUM_LINES} more times" in lines
        assert len(lines) == 2 * (NUM_LINES + 1)


@in_loop
async def test_a_workers_long_words_are_cut(caplog):
    async with world(*BOTH) as it:
        _, spec = await started(it)
        await it.say("decode-0", spec, 0, end=EndReason.REJECTED, message="x" * 2000)
        (line,) = lines_of(caplog)
        assert 400 < len(line) < 500


# --- workers that come and go ---


async def come_and_go(it, worker_id, number) -> None:
    generation = f"g{number}"
    await it.hear(worker_id, hello(worker_id, generation))
    await it.hear(worker_id, Goodbye(generation, "bye", LeaveCause.SHUTDOWN))


@in_loop
async def test_a_worker_that_comes_and_goes_is_a_few_lines_and_hides_no_other(caplog):
    caplog.set_level(logging.INFO)
    async with world(*BOTH) as it:
        caplog.clear()
        for number in range(100):
            await come_and_go(it, "decode-9", number)
        assert len(caplog.messages) == NUM_LINES
        assert caplog.messages[:2] == ["decode worker decode-9 joined", "decode worker decode-9 is gone: left: bye"]
        await it.hear("prefill-0", Goodbye("g1", "bye", LeaveCause.SHUTDOWN))
        assert caplog.messages[NUM_LINES:] == ["prefill worker prefill-0 is gone: left: bye"]
        await it.pass_time(PERIOD_S, {"decode-0": "g1"})
        assert caplog.messages[NUM_LINES + 1 :] == [f"worker 'decode-9': {200 - NUM_LINES} more lines about it"]


@in_loop
async def test_a_worker_that_is_refused_again_and_again_between_its_joins_is_a_few_lines(caplog):
    caplog.set_level(logging.INFO)
    async with world(*BOTH) as it:
        for number in range(50):
            await come_and_go(it, "decode-9", number)
            await it.hear("decode-9", hello("decode-9", f"h{number}", protocol=1))
        assert len([line for line in caplog.messages if "decode-9" in line]) == NUM_LINES


@in_loop
async def test_workers_of_ever_new_ids_have_a_ceiling_together(caplog):
    caplog.set_level(logging.INFO)
    async with world(*BOTH, cluster=ClusterSettings(max_workers=32)) as it:
        caplog.clear()
        for number in range(500):
            await come_and_go(it, f"decode-{number + 1}", 1)
        assert len(caplog.messages) == 2 * (32 - len(BOTH)) + NUM_LINES
        await it.pass_time(PERIOD_S, dict.fromkeys(BOTH, "g1"))
        assert caplog.messages[-1].startswith("worker '(others)': ")
        await come_and_go(it, "decode-1000", 1)
        assert caplog.messages[-1] == "decode worker decode-1000 is gone: left: bye", "a new period, with room for all"


@in_loop
async def test_each_of_many_workers_that_are_lost_at_once_is_named(caplog):
    caplog.set_level(logging.INFO)
    async with world(*(f"decode-{number}" for number in range(64))) as it:
        await it.pass_time(ClusterSettings().dead_after_s + 1.0)
        gone = {line.split()[2] for line in caplog.messages if "is gone" in line}
        assert gone == {f"decode-{number}" for number in range(64)}


@in_loop
async def test_lines_below_the_level_take_no_place_of_a_loss(caplog):
    caplog.set_level(logging.WARNING)
    async with world(*BOTH) as it:
        for number in range(NUM_LINES):
            await it.hear("decode-9", hello("decode-9", f"g{number}"))
        await it.pass_time(3.0, dict.fromkeys(BOTH, "g1"))
        gone = [line for line in caplog.messages if line.startswith("decode worker decode-9 is gone: ")]
        assert len(gone) == NUM_LINES
        assert "silent" in gone[-1]


@in_loop
async def test_strangers_that_are_refused_hide_no_loss_and_are_told_when_there_is_room(caplog):
    async with world(*BOTH, cluster=ClusterSettings(max_workers=8)) as it:
        strangers = [f"decode-{number + 100}" for number in range(2 * NUM_LINES)]
        for _ in range(2):
            for stranger in strangers:
                await it.hear(stranger, hello(stranger, protocol=1))
        assert len(caplog.messages) == NUM_LINES
        await it.hear("prefill-0", Goodbye("g1", "bye", LeaveCause.SHUTDOWN))
        assert caplog.messages[NUM_LINES:] == ["prefill worker prefill-0 is gone: left: bye"]
        await it.pass_time(PERIOD_S, {"decode-0": "g1"})
        for stranger in strangers:
            await it.hear(stranger, hello(stranger, protocol=1))
        assert {line.split("'")[1] for line in caplog.messages if "is refused" in line} == set(strangers)


@in_loop
async def test_messages_that_trip_a_bug_are_a_few_traces(caplog, monkeypatch):
    async with world(*BOTH) as it:
        monkeypatch.setattr(it.cluster, "receive", lambda *_: 1 / 0)
        for _ in range(100):
            await it.hear("stranger", Goodbye("g1", "bye"))
        assert len(caplog.records) == NUM_LINES
        assert all(record.exc_info for record in caplog.records)


@in_loop
async def test_a_leaving_workers_long_words_are_cut(caplog):
    async with world(*BOTH) as it:
        await it.hear("decode-0", Goodbye("g1", "x" * 2000))
        assert len(caplog.messages[-1]) == MAX_LOGGED_CHARS
