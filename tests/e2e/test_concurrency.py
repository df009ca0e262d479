"""Many streams at once: each gets what it would get alone, and nothing is left behind."""

from concurrent.futures import ThreadPoolExecutor

from tests.e2e.client import complete, stream
from tests.e2e.prompts import PROMPTS

NUM_STREAMS = 32


def calls():
    """32 calls of mixed prompt and output lengths; every second one samples with a seed."""
    for i in range(NUM_STREAMS):
        prompt = PROMPTS[i % len(PROMPTS)].text + " and so on," * (i * 5 % 19)
        sampling = {"temperature": 0.9, "top_p": 0.95, "seed": i} if i % 2 else {"temperature": 0}
        yield {"prompt": prompt, "max_tokens": 2 + i * 5 % 9, "ignore_eos": True, **sampling}


def test_thirty_two_streams_equal_their_solo_runs(cluster):
    alone = [complete(cluster.http, **call) for call in calls()]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        together = list(pool.map(lambda call: stream(cluster.http, **call), calls()))
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert [answer.usage["total_tokens"] for answer in together] == [answer.usage["total_tokens"] for answer in alone]
    assert [answer.num_tokens for answer in together] == [call["max_tokens"] for call in calls()]
    assert {answer.finish_reason for answer in together} == {"length"}
    assert {answer.num_done for answer in together} == {1}
    cluster.wait_pools_empty()


def test_a_seed_repeats_a_draw_and_another_seed_does_not(cluster):
    runs = [complete(cluster.http, "My favourite", temperature=1.0, seed=seed, max_tokens=8).text for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    unseeded = {complete(cluster.http, "My favourite", temperature=1.0, max_tokens=8).text for _ in range(3)}
    assert len(unseeded) > 1
