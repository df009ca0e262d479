"""How likely tokens were, from workers to the consumer: with its token each, through every way of the attempts."""

import pytest

from gateway.backend import InvalidRequestError, RequestFailedError
from kvtransfer.messages import DecodeRequest, Goodbye, PrefillRequest
from kvtransfer.request_parts import MAX_PROMPT_LOGPROBS, EndReason, PromptLogprobs, TokenLogprob
from kvtransfer.worker_facts import Limits
from tests.gateway.cluster_world import hello, world
from tests.gateway.test_dispatch import BOTH, in_loop, started

PROMPT = (5, 6, 7, 8)


def told(*numbers) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(-float(number), number) for number in numbers)


def scores(start, *numbers) -> PromptLogprobs:
    return PromptLogprobs(start, told(*numbers))


def ranks(client) -> list[int]:
    """Of all tokens that the client has, in order."""
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in client.deltas)
    return [logprob.rank for delta in client.deltas for logprob in delta.logprobs]


def prompt_ranks(client) -> list:
    """What each delta says of the prompt; it should be the first one alone that says anything."""
    return [delta.prompt_logprobs and [logprob.rank for logprob in delta.prompt_logprobs] for delta in client.deltas]


# --- of the output -----------------------------------------------------------------------------------


@in_loop
async def test_each_token_has_its_own_whoever_is_heard_first():
    for decode_first in (False, True):
        async with world(*BOTH) as it:
            client, spec = await started(it, max_tokens=4, num_logprobs=0)
            if not decode_first:
                await it.say("prefill-0", spec, 0, [10], logprobs=told(1))
            await it.say("decode-0", spec, 0, [10, 11], logprobs=told(1, 2))
            await it.say("decode-0", spec, 2, [12], logprobs=told(3))
            if decode_first:
                await it.say("prefill-0", spec, 0, [10], logprobs=told(1))
            await it.say("decode-0", spec, 3, [13], EndReason.LENGTH, logprobs=told(4))
            assert (client.tokens, ranks(client)) == ([10, 11, 12, 13], [1, 2, 3, 4])
            it.assert_empty()


@in_loop
async def test_tokens_that_wait_for_prefill_s_keep_their_own():
    async with world(*BOTH) as it:
        client, spec = await started(it, max_tokens=3, num_logprobs=0)
        await it.say("decode-0", spec, 1, [11], logprobs=told(2))
        await it.say("decode-0", spec, 2, [12], EndReason.LENGTH, logprobs=told(3))
        assert client.tokens == []
        await it.say("prefill-0", spec, 0, [10], logprobs=told(1))
        assert (client.tokens, ranks(client)) == ([10, 11, 12], [1, 2, 3])


@in_loop
async def test_those_of_a_lost_attempt_are_kept_like_its_tokens():
    """One token is at the client, one known but held back, when decode dies."""
    async with world("prefill-0", "decode-0", "decode-1") as it:
        client, spec = await started(it, has_room=False, max_tokens=5, num_logprobs=0)
        await it.say("prefill-0", spec, 0, [10], logprobs=told(1))
        assert client.tokens == [], "decode has not said that it has room"
        await it.hear("decode-0", Goodbye("g1", "bye"))
        spec = it.spec("decode-1", DecodeRequest)
        assert (spec.output_token_ids, spec.sampling.num_logprobs) == ((10,), 0)
        await it.say("prefill-0", spec, 1, [11], logprobs=told(2))
        await it.say("decode-1", spec, 1, [11, 12], logprobs=told(2, 3))
        assert (client.tokens, ranks(client)) == ([10, 11, 12], [1, 2, 3])
        await it.hear("decode-1", Goodbye("g1", "bye"))
        await it.join("decode-0", generation="g2")
        spec = it.spec("decode-0", DecodeRequest)
        assert spec.output_token_ids == (10, 11, 12)
        await it.say("decode-0", spec, 3, [13, 14], EndReason.LENGTH, generation="g2", logprobs=told(4, 5))
        await it.say("prefill-0", spec, 3, [13], logprobs=told(4))
        assert (client.tokens, ranks(client)) == ([10, 11, 12, 13, 14], [1, 2, 3, 4, 5])
        it.assert_empty()


@pytest.mark.parametrize(("asked", "said"), [(0, ()), (0, told(1, 2)), (None, told(1))])
@in_loop
async def test_too_few_or_too_many_are_the_workers_fault(asked, said):
    async with world(*BOTH) as it:
        client, spec = await started(it, num_logprobs=asked)
        await it.say("prefill-0", spec, 0, [10], logprobs=said)
        assert isinstance(client.error, RequestFailedError)
        it.assert_empty()


# --- of the prompt -----------------------------------------------------------------------------------


@in_loop
async def test_a_prompt_s_come_in_pieces_and_go_out_with_the_first_token():
    async with world(*BOTH) as it:
        client, spec = await started(it, prompt=PROMPT, max_tokens=2, num_prompt_logprobs=0)
        await it.say("prefill-0", spec, 0, prompt_logprobs=scores(1, 1, 2))
        assert client.deltas == []
        await it.say("prefill-0", spec, 0, prompt_logprobs=scores(3, 3))
        await it.say("prefill-0", spec, 0, [10])
        await it.say("decode-0", spec, 0, [10, 11], EndReason.LENGTH)
        assert client.tokens == [10, 11]
        assert prompt_ranks(client) == [[1, 2, 3], None]
        it.assert_empty()


@in_loop
async def test_decode_s_tokens_wait_for_what_prefill_has_to_say_of_the_prompt():
    async with world(*BOTH) as it:
        client, spec = await started(it, prompt=PROMPT, max_tokens=2, num_prompt_logprobs=0)
        await it.say("decode-0", spec, 0, [10, 11], EndReason.LENGTH)
        assert (client.deltas, client.finish) == ([], None)
        await it.say("prefill-0", spec, 0, prompt_logprobs=scores(1, 1, 2, 3))
        assert (client.tokens, client.finish) == ([10, 11], EndReason.LENGTH)
        assert prompt_ranks(client) == [[1, 2, 3]]
        it.assert_empty()


@in_loop
async def test_a_local_prompt_s_come_from_decode():
    async with world("decode-0") as it:
        client = await it.ask(PROMPT, max_tokens=1, mode=None, num_prompt_logprobs=0, num_logprobs=0)
        spec = it.spec("decode-0", DecodeRequest)
        await it.reserve(spec)
        await it.say("decode-0", spec, 0, prompt_logprobs=scores(1, 1, 2, 3))
        await it.say("decode-0", spec, 0, [10], EndReason.LENGTH, logprobs=told(9))
        assert (prompt_ranks(client), ranks(client)) == ([[1, 2, 3]], [9])
        it.assert_empty()


@in_loop
async def test_a_prompt_of_one_token_has_none():
    async with world(*BOTH) as it:
        client, spec = await started(it, prompt=(5,), max_tokens=1, num_prompt_logprobs=3)
        await it.say("prefill-0", spec, 0, [10], EndReason.LENGTH)
        assert prompt_ranks(client) == [()]


@in_loop
async def test_who_has_not_asked_gets_none():
    async with world(*BOTH) as it:
        client, spec = await started(it, prompt=PROMPT, max_tokens=1)
        await it.say("prefill-0", spec, 0, [10], EndReason.LENGTH)
        assert prompt_ranks(client) == [None]


@pytest.mark.parametrize("all_tokens", [False, True])
@in_loop
async def test_a_prompt_that_was_not_told_whole_is_computed_again_from_nothing(all_tokens):
    """Decode may have said everything already: the next attempt could not go on behind that."""
    async with world("prefill-0", "prefill-1", "decode-0") as it:
        client, spec = await started(it, prompt=PROMPT, max_tokens=2, num_prompt_logprobs=0, num_logprobs=0)
        await it.say("prefill-0", spec, 0, prompt_logprobs=scores(1, 7))
        if all_tokens:
            await it.say("decode-0", spec, 0, [10, 11], EndReason.LENGTH, logprobs=told(8, 9))
        await it.hear("prefill-0", Goodbye("g1", "bye"))
        spec = it.spec("prefill-1", PrefillRequest)
        assert (spec.attempt, spec.output_token_ids, spec.sampling.num_prompt_logprobs) == (1, (), 0)
        assert it.spec("decode-0", DecodeRequest) == spec
        await it.reserve(spec)
        await it.say("prefill-1", spec, 0, prompt_logprobs=scores(1, 1, 2, 3))
        await it.say("prefill-1", spec, 0, [10], logprobs=told(4))
        await it.say("decode-0", spec, 0, [10, 11], EndReason.LENGTH, logprobs=told(4, 5))
        assert (client.tokens, ranks(client), prompt_ranks(client)) == ([10, 11], [4, 5], [[1, 2, 3], None])
        it.assert_empty()


@in_loop
async def test_once_told_a_prompt_is_not_scored_again():
    async with world("prefill-0", "decode-0", "decode-1") as it:
        client, spec = await started(it, prompt=PROMPT, max_tokens=3, num_prompt_logprobs=0)
        await it.say("prefill-0", spec, 0, prompt_logprobs=scores(1, 1, 2, 3))
        await it.say("prefill-0", spec, 0, [10])
        await it.hear("decode-0", Goodbye("g1", "bye"))
        spec = it.spec("decode-1", DecodeRequest)
        assert (spec.output_token_ids, spec.sampling.num_prompt_logprobs) == ((10,), None)
        await it.say("prefill-0", spec, 1, [11])
        await it.say("decode-1", spec, 1, [11, 12], EndReason.LENGTH)
        assert (client.tokens, prompt_ranks(client)) == ([10, 11, 12], [[1, 2, 3], None, None])
        it.assert_empty()


@pytest.mark.parametrize(
    "words",
    [
        [("prefill-0", scores(2, 1))],
        [("prefill-0", scores(1, 1)), ("prefill-0", scores(1, 1))],
        [("prefill-0", scores(1, 1)), ("prefill-0", scores(3, 3))],
        [("prefill-0", scores(1, 1, 2, 3, 4))],
        [("decode-0", scores(1, 1, 2, 3))],
    ],
)
@in_loop
async def test_pieces_that_do_not_fit_are_the_workers_fault(words):
    async with world(*BOTH) as it:
        client, spec = await started(it, prompt=PROMPT, num_prompt_logprobs=0)
        for worker_id, piece in words:
            await it.say(worker_id, spec, 0, prompt_logprobs=piece)
        assert isinstance(client.error, RequestFailedError)
        it.assert_empty()


@pytest.mark.parametrize("pieces", [[], [scores(1, 1, 2)]])
@in_loop
async def test_a_first_token_before_all_of_the_prompt_is_the_workers_fault(pieces):
    async with world(*BOTH) as it:
        client, spec = await started(it, prompt=PROMPT, num_prompt_logprobs=0)
        for piece in pieces:
            await it.say("prefill-0", spec, 0, prompt_logprobs=piece)
        await it.say("prefill-0", spec, 0, [10])
        assert isinstance(client.error, RequestFailedError)
        it.assert_empty()


@in_loop
async def test_pieces_nobody_asked_for_are_the_workers_fault():
    async with world(*BOTH) as it:
        client, spec = await started(it, prompt=PROMPT)
        await it.say("prefill-0", spec, 0, prompt_logprobs=scores(1, 1))
        assert isinstance(client.error, RequestFailedError)


@in_loop
async def test_prefill_counts_as_busy_until_its_token_is_there():
    async with world(*BOTH) as it:
        _, spec = await started(it, prompt=PROMPT, num_prompt_logprobs=0)
        book = it.dispatcher._flights.book
        await it.say("prefill-0", spec, 0, prompt_logprobs=scores(1, 1, 2, 3))
        assert ("prefill-0", spec.request_id) in book.entries
        await it.say("prefill-0", spec, 0, [10])
        assert ("prefill-0", spec.request_id) not in book.entries


@in_loop
async def test_what_decode_holds_does_not_make_a_scored_prompt_local():
    prompt = tuple(index % 90 for index in range(400))
    async with world(*BOTH) as it:
        for fields, mode in (({}, "disaggregated"), ({"max_tokens": 4}, "local"), ({"num_prompt_logprobs": 0}, None)):
            client = await it.ask(prompt, **{"max_tokens": 3, **fields}, mode=None)
            assert client.mode.value == (mode or "disaggregated")
            spec = it.spec("decode-0", DecodeRequest)
            await it.reserve(spec)
            if mode == "disaggregated":
                await it.say("prefill-0", spec, 0, [10])
            await it.say("decode-0", spec, 0, [10, 11, 12], EndReason.STOP)
            await client.leave()


@in_loop
async def test_what_a_scored_prompt_finds_tells_nothing_of_the_cache():
    """It takes nothing from there, which does not mean that nothing is there."""
    prompt = tuple(index % 90 for index in range(400))
    async with world("decode-0") as it:
        held = it.dispatcher._flights.held
        client = await it.ask(prompt, max_tokens=1, mode=None)
        spec = it.spec("decode-0", DecodeRequest)
        await it.say("decode-0", spec, 0, [10], EndReason.LENGTH)
        await client.task
        await it.ask(prompt, max_tokens=1, mode=None, num_prompt_logprobs=0)
        spec = it.spec("decode-0", DecodeRequest)
        flight = next(iter(it.dispatcher._flights._flights.values()))
        before = held.num_held(("decode-0", "g1"), flight.chain, prompt)
        await it.reserve(spec)
        assert held.num_held(("decode-0", "g1"), flight.chain, prompt) == before > 300


@in_loop
async def test_a_prompt_with_too_many_is_refused():
    limits = Limits(1 << 20, 8, 1 << 20)
    async with world() as it:
        for worker_id in BOTH:
            await it.hear(worker_id, hello(worker_id, limits=limits))
        prompt = (1,) * (MAX_PROMPT_LOGPROBS // 21 + 1)
        client = await it.ask(prompt, num_prompt_logprobs=20)
        assert isinstance(client.error, InvalidRequestError)
        assert str(len(prompt)) in str(client.error)
        client = await it.ask(prompt, num_prompt_logprobs=19)
        assert client.error is None
        await client.leave()
