"""Who says how likely tokens were: each once, in order, whatever becomes of the request meanwhile."""

from engine.request import RowLogprobs, StepResult
from kvtransfer.incoming import ReceptionEnded, ReceptionOutcome
from kvtransfer.request_parts import TokenLogprob
from prefill.scheduler import SendFirstToken
from tests.lifecycle.makers import EOS, Decode, Prefill


def told_of(number: int) -> TokenLogprob:
    return TokenLogprob(-float(number), number)


def step(world, now=1.0, token_id=50):
    """One step in which each asked row tells `told_of` the position of the token that it is about."""
    rows = world.scheduler.schedule(now)
    logprobs = {}
    for index, row in enumerate(rows):
        asked = row.samples and row.request.sampling.num_logprobs is not None
        prompt = tuple(told_of(place + 1) for place in row.scored)
        if asked or prompt:
            logprobs[index] = RowLogprobs(told_of(row.stop) if asked else None, prompt)
    sampled = [token_id if row.samples else None for row in rows]
    world.scheduler.complete(rows, StepResult(sampled, logprobs), now)
    world.check()
    return {row.request.spec.request_id: (row.start, row.stop) for row in rows}


def arrive(world, token_id, logprob):
    """All KV and the first token are there."""
    event = ReceptionEnded(("r", 0), ReceptionOutcome.ARRIVED, token_id, first_logprob=logprob)
    world.scheduler.reception_ended(event, 1.0)


def scores_of(world, name="r") -> list:
    """(start, ranks) of each word on the prompt, and what was said of tokens: (start, token ids, ranks)."""
    prompts, tokens = [], []
    for item in world.scheduler.take_outputs():
        output = item.output
        if output.request_id != name:
            continue
        if output.prompt_logprobs is not None:
            assert tokens == [], "the prompt comes first"
            prompts.append((output.prompt_logprobs.start, [found.rank for found in output.prompt_logprobs.tokens]))
        if output.token_ids:
            tokens.append((output.start, output.token_ids, [found.rank for found in output.logprobs]))
    return [prompts, tokens]


def test_prefill_tells_of_the_prompt_chunk_by_chunk_and_of_its_token_to_both():
    world = Prefill()
    world.add(num_prompt=20, num_logprobs=0, num_prompt_logprobs=0)
    while step(world):
        pass
    prompts, tokens = scores_of(world)
    assert prompts == [(1, [*range(1, 9)]), (9, [*range(9, 17)]), (17, [17, 18, 19])]
    assert tokens == [(0, (50,), [20])]
    assert world.scheduler.take_commands()[-1] == SendFirstToken(("r", 0), 50, told_of(20))
    world.ended()
    assert scores_of(world) == [[], [(0, (50,), [20])]], "said again with the end"
    world.check_all_is_empty()


def test_a_prompt_of_one_token_has_nothing_to_tell():
    world = Prefill()
    world.add(num_prompt=1, num_prompt_logprobs=3, max_tokens=1)
    step(world)
    assert scores_of(world) == [[], [(0, (50,), [])]]


def test_a_scored_prompt_takes_nothing_from_the_cache_and_leaves_its_own_there():
    world = Prefill(share_prefixes=True)
    for name, fields in (("first", {}), ("scored", {"num_prompt_logprobs": 0}), ("later", {})):
        job = world.add(name, num_prompt=12, **fields)
        while step(world):
            pass
        world.ended(name)
        assert job.num_cached == (8 if name == "later" else 0), name
    world.check_all_is_empty()


def test_decode_tells_prefill_s_token_again_with_the_next_one():
    world = Decode()
    world.add(num_logprobs=0, max_tokens=3)
    arrive(world, 50, told_of(4))
    step(world, token_id=60)
    step(world, token_id=61)
    assert scores_of(world) == [[], [(0, (50, 60), [4, 5]), (2, (61,), [6])]]
    world.ended()
    world.check_all_is_empty()


def test_decode_leaves_the_prompt_to_prefill():
    world = Decode(share_prefixes=True)
    for name in ("a", "b"):
        job = world.add(name, num_prompt=8, num_prompt_logprobs=0, max_tokens=2)
        world.arrive(name)
        assert step(world) == {name: (8, 9)}
        assert scores_of(world, name)[0] == []
        world.ended(name)
    assert job.num_cached == 8, "what it finds in its cache need not be sent"
    world.check_all_is_empty()


def test_decode_s_word_on_a_first_token_that_is_the_last():
    world = Decode()
    world.add(num_logprobs=0)
    arrive(world, EOS, told_of(4))
    assert scores_of(world) == [[], [(0, (EOS,), [4])]]


def test_what_nobody_asked_for_is_dropped():
    world = Decode()
    world.add(max_tokens=2)
    arrive(world, 50, told_of(4))
    step(world)
    assert scores_of(world) == [[], [(0, (50, 50), [])]]


def test_a_local_prompt_that_is_preempted_is_told_once():
    """`late` is scored in part, loses its blocks to `early`, and is computed again from its start."""
    world = Decode(num_blocks=6, block_size=4, share_prefixes=True)
    world.add("early", num_prompt=3, local=True, max_tokens=13)
    step(world)
    world.add("late", num_prompt=13, local=True, max_tokens=2, num_prompt_logprobs=0, num_logprobs=0)
    seen, steps = [[], []], []
    while rows := step(world):
        steps.append(rows.get("late"))
        for kept, new in zip(seen, scores_of(world, "late"), strict=True):
            kept += new
        if len(steps) == 1:
            late = world.scheduler.find(("late", 0))
            world.scheduler._preempt(late)
            assert (late.num_scored, late.block_ids) == (8, [])
    assert steps[:2] == [(0, 8), (0, 8)], "from its start: what is still in the pool brings no logits"
    assert seen[0] == [(1, [*range(1, 9)]), (9, [9, 10, 11, 12])]
    assert seen[1] == [(0, (50,), [13]), (1, (50,), [14])]
    world.check_all_is_empty()
