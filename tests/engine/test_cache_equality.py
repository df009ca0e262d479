"""Answers are the same with the prefix cache on and off: random chats of several turns, through prefill and decode,
float32, token for token, in pools so small that the cache has to make room and requests lose their blocks.
"""

import random
from collections.abc import Callable, Iterator

import pytest

from kvtransfer.request_parts import RequestSpec, SamplingParams
from tests.engine.chat_world import ChatWorld, PoolSizes, Service, Turn

NUM_CHATS, NUM_ROUNDS, SEEDS = 7, 3, range(4)
ROOMY = PoolSizes(prefill=150, decode=300)
TIGHT = PoolSizes(prefill=14, decode=26)
"""Room for little more than the longest chat."""
TIGHT_WITH_SWAP = PoolSizes(prefill=14, decode=26, swap=40)
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.3},
]


@pytest.fixture(scope="module")
def world(tiny_checkpoint):
    return ChatWorld(tiny_checkpoint("llama3"))


class Chats:
    """Users who talk: what they say depends on the seed and on the answers alone."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        system = [self._words(33), self._words(18)]
        self._histories = [list(self._dice.choice(system)) for _ in range(NUM_CHATS)]
        self._salts = [self._dice.choice(["", "", "a", "b"]) for _ in range(NUM_CHATS)]
        self._number = 0

    def turns(self) -> list[Turn]:
        """One of most chats; some go back to an earlier point, and say something else."""
        turns = []
        for chat in self._dice.sample(range(NUM_CHATS), NUM_CHATS - 1):
            history = self._histories[chat]
            if self._dice.random() < 0.2:
                del history[self._dice.randint(10, len(history)) :]
            history += self._words(self._dice.randint(1, 9))
            turns.append(self._turn(chat, tuple(history)))
        return turns

    def hear(self, answers: dict[str, list[int]]) -> None:
        for name, token_ids in answers.items():
            self._histories[int(name.partition("-")[0])] += token_ids

    def _turn(self, chat: int, prompt: tuple[int, ...]) -> Turn:
        self._number += 1
        sampling = self._dice.choice(SAMPLINGS)
        params = SamplingParams(max_tokens=self._dice.choice((1, 20, 50)), seed=self._number, **sampling)
        spec = RequestSpec(f"{chat}-{self._number}", 0, prompt, params, cache_salt=self._salts[chat])
        return Turn(spec, local=self._dice.random() < 0.3)

    def _words(self, count: int) -> list[int]:
        return [self._dice.randrange(5, 300) for _ in range(count)]


def talk(seed: int, service: Service) -> Iterator[dict[str, list[int]]]:
    """The answers of each round."""
    chats = Chats(seed)
    for _ in range(NUM_ROUNDS):
        answers = service.round(chats.turns())
        chats.hear(answers)
        yield answers


@pytest.fixture(scope="module")
def uncached(world) -> Callable[[int], list]:
    """What is answered with all the room in the world and nothing shared."""
    known: dict[int, list] = {}

    def answers_of(seed: int) -> list:
        if seed not in known:
            service = world.serve(ROOMY, share_prefixes=False)
            known[seed] = list(talk(seed, service))
            prefill, decode = service.loads
            assert prefill.prefix_hits == decode.prefix_hits == decode.num_preemptions == 0
        return known[seed]

    return answers_of


@pytest.mark.parametrize("sizes", [ROOMY, TIGHT, TIGHT_WITH_SWAP], ids=["roomy", "tight", "swap"])
def test_the_cache_changes_no_answer(world, uncached, sizes):
    num_preemptions = num_swapped_in = 0
    for seed in SEEDS:
        service = world.serve(sizes, share_prefixes=True)
        assert list(talk(seed, service)) == uncached(seed)
        prefill, decode = service.loads
        assert min(prefill.prefix_hits, decode.prefix_hits) > 0
        if sizes is not ROOMY:
            assert min(prefill.prefix_evictions, decode.prefix_evictions) > 0, "nothing had to make room"
        num_preemptions += decode.num_preemptions
        num_swapped_in += decode.swap.num_in
    assert (num_preemptions > 0) == (sizes is not ROOMY)
    assert (num_swapped_in > 0) == (sizes is TIGHT_WITH_SWAP)


@pytest.mark.parametrize("sizes", [TIGHT, TIGHT_WITH_SWAP], ids=["recompute", "swap"])
def test_nor_do_small_pools_without_it(world, uncached, sizes):
    num_preemptions = 0
    for seed in SEEDS:
        service = world.serve(sizes, share_prefixes=False)
        assert list(talk(seed, service)) == uncached(seed)
        num_preemptions += service.loads[1].num_preemptions
    assert num_preemptions > 0


def test_the_comparison_sees_a_cache_that_shares_what_it_must_not(world, uncached, monkeypatch):
    """The negative control: blocks named by their own tokens alone, whatever stands before them."""
    monkeypatch.setattr("engine.prefix_hash.BlockNames.of", _names_without_their_head)
    service = world.serve(TIGHT, share_prefixes=True)
    try:
        answers = list(talk(0, service))
    except AssertionError:
        return
    assert answers != uncached(0)


def _names_without_their_head(self, tokens, num_blocks):
    size = self._block_size
    return [repr(tokens.token_slice(at * size, at * size + 3)).encode() for at in range(num_blocks)]
