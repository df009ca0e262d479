"""Between prefill workers a prompt goes to the one that has its beginning, as far as the gateway knows."""

from contextlib import asynccontextmanager

from gateway.modes import Mode
from kvtransfer.messages import Goodbye, PrefillRequest
from kvtransfer.request_parts import EndReason, RequestOutput
from kvtransfer.worker_facts import Limits
from tests.gateway.cluster_world import hello, step, world
from tests.gateway.test_dispatch import in_loop

PROMPT = tuple(range(1, 100))  # 6 full blocks of 16, and 3 tokens
TWO = ("prefill-0", "prefill-1", "decode-0")
ROOMY = Limits(max_model_len=1000, max_num_seqs=100, kv_tokens=20_000)


def strange(number: int, length: int) -> tuple[int, ...]:
    """A prompt that begins like no other one."""
    return (number, number, *(index % 100 for index in range(length - 2)))


@asynccontextmanager
async def two_prefill_workers(**about):
    async with world("decode-0") as it:
        await it.hear("prefill-0", hello("prefill-0", limits=ROOMY))
        await it.hear("prefill-1", hello("prefill-1", limits=ROOMY, **about))
        yield it


async def computed(it, prompt, worker_id="prefill-0", **about):
    """A request whose prompt is computed on `worker_id`, and that ends there."""
    before = len(it.control.to(worker_id, PrefillRequest))
    client = await it.ask(prompt=prompt, max_tokens=1, mode=Mode.DISAGGREGATED, **about)
    assert len(it.control.to(worker_id, PrefillRequest)) == before + 1, "it went elsewhere"
    await it.say(worker_id, it.spec(worker_id, PrefillRequest), 0, [7], EndReason.LENGTH)
    assert client.finish is EndReason.LENGTH, client.error


async def next_goes_to(it, prompt) -> str:
    before = {worker_id: len(it.control.to(worker_id, PrefillRequest)) for worker_id in TWO[:2]}
    client = await it.ask(prompt=prompt, max_tokens=1, mode=Mode.DISAGGREGATED)
    (chosen,) = (name for name in TWO[:2] if len(it.control.to(name, PrefillRequest)) > before[name])
    await client.leave()
    await it.settle()
    return chosen


async def warm(it) -> None:
    """prefill-1 computes PROMPT, because prefill-0 is busy."""
    busy = await it.ask(prompt=strange(5, 60), max_tokens=1)
    await computed(it, PROMPT, "prefill-1")
    await busy.leave()
    await it.settle()


@in_loop
async def test_a_prompt_goes_where_it_was_computed():
    async with two_prefill_workers() as it:
        await warm(it)
        assert await next_goes_to(it, PROMPT) == "prefill-1"
        assert await next_goes_to(it, (*PROMPT[:40], 7, 8)) == "prefill-1"
        assert await next_goes_to(it, strange(9, 99)) == "prefill-0"
        it.assert_empty()


@in_loop
async def test_but_not_into_a_queue_that_is_longer_than_what_is_saved():
    async with two_prefill_workers() as it:
        await warm(it)
        waiting = [await it.ask(prompt=(*PROMPT[:96], number), max_tokens=1) for number in range(3)]
        assert [client.error for client in waiting] == [None] * 3
        booked = it.dispatcher._flights.book.num_tokens
        assert (booked("prefill-0"), booked("prefill-1")) == (0, 3), "each has one token left to compute"
        await it.ask(prompt=strange(6, 101), max_tokens=1)
        assert booked("prefill-0") == 101
        await it.ask(prompt=strange(7, 201), max_tokens=1)
        assert booked("prefill-1") == 3 + 201
        assert await next_goes_to(it, PROMPT) == "prefill-0", "96 tokens saved, 103 more to wait for"


@in_loop
async def test_only_a_prompt_that_is_computed_counts_as_held():
    async with two_prefill_workers() as it:
        busy = await it.ask(prompt=strange(5, 60), max_tokens=1)
        client = await it.ask(prompt=PROMPT, max_tokens=1)
        spec = it.spec("prefill-1", PrefillRequest)
        await it.hear("prefill-1", step(RequestOutput(spec.request_id, 0, 0)))
        await client.leave()
        await busy.leave()
        await it.settle()
        assert await next_goes_to(it, PROMPT) == "prefill-0"


@in_loop
async def test_another_start_holds_nothing():
    async with two_prefill_workers() as it:
        await warm(it)
        await it.hear("prefill-1", Goodbye("g1", "bye"))
        await it.hear("prefill-1", hello("prefill-1", "g2", limits=ROOMY))
        assert await next_goes_to(it, PROMPT) == "prefill-0"


@in_loop
async def test_what_is_reset_is_forgotten():
    async with two_prefill_workers() as it:
        await warm(it)
        it.dispatcher.reset_prefix_cache()
        assert await next_goes_to(it, PROMPT) == "prefill-0"


@in_loop
async def test_a_worker_that_keeps_nothing_is_not_expected_to():
    async with two_prefill_workers(shares_prefixes=False) as it:
        await warm(it)
        assert await next_goes_to(it, PROMPT) == "prefill-0"
