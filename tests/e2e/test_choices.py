"""Several choices of a prompt over real processes: one prefill, one transfer, and the answers of single calls."""

import json

import pytest

from tests.e2e.client import DONE, body_of, complete, events
from tests.e2e.processes import wait_until

PROMPT = [10 + number * 7 % 289 for number in range(1003)]
SAMPLED = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "max_tokens": 12}
LOCAL = {"X-KVSplice-Mode": "local"}


def choices(http, n, prompt=PROMPT, headers=None, **fields):
    """The texts of a call's choices, in the order of their indices, and its usage."""
    response = http.post("/v1/completions", json=body_of(prompt, n=n, **SAMPLED | fields), headers=headers)
    assert response.status_code == 200, response.text
    payload = response.json()
    assert [choice["index"] for choice in payload["choices"]] == list(range(len(payload["choices"])))
    return [choice["text"] for choice in payload["choices"]], payload["usage"]


def counters(cluster) -> tuple[float, float]:
    """KV bytes that prefill has sent, and prompt tokens that it has admitted, by its last heartbeat."""
    names = ("kv_transfer_bytes_total", "prefix_cache_queries_total")
    found = [cluster.gauge(name, role="prefill", worker="prefill-0") for name in names]
    assert None not in found, found
    return tuple(found)


def cost_of(cluster, **call) -> tuple[float, float]:
    """What a call adds to the counters, from an empty cache."""
    assert cluster.http.post("/reset_prefix_cache").status_code == 200
    before = counters(cluster)
    choices(cluster.http, **call)
    wait_until(lambda: counters(cluster)[0] > before[0], within_s=10.0, what="the counters are here")
    cluster.wait_pools_empty()
    return tuple(now - then for now, then in zip(counters(cluster), before, strict=True))


def test_eight_choices_cost_the_prefill_and_the_transfer_of_one(healthy):
    one, eight = cost_of(healthy, n=1), cost_of(healthy, n=8)
    assert one[1] == len(PROMPT)
    assert eight == one


def test_choices_do_not_depend_on_their_number_or_the_way(healthy):
    four, usage = choices(healthy.http, 4)
    assert len(set(four)) == 4
    assert usage["prompt_tokens"] == len(PROMPT)
    assert usage["completion_tokens"] == 4 * SAMPLED["max_tokens"]
    assert choices(healthy.http, 4, headers=LOCAL)[0] == four
    assert choices(healthy.http, 2)[0] == four[:2]
    assert choices(healthy.http, 4, best_of=4)[0] == four
    assert complete(healthy.http, PROMPT, **SAMPLED).text == four[0]
    assert len(set(choices(healthy.http, 3, temperature=0)[0])) == 1


def test_the_best_choices_are_those_that_are_likely_by_their_own_tokens(healthy):
    fields = body_of(PROMPT, n=6, logprobs=0, **SAMPLED)
    told = healthy.http.post("/v1/completions", json=fields).json()["choices"]
    # All have as many tokens, so the sums tell who is best.
    ranked = sorted(told, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    best, usage = choices(healthy.http, 2, best_of=6)
    assert best == [choice["text"] for choice in ranked[:2]]
    assert usage["completion_tokens"] == 6 * SAMPLED["max_tokens"]
    assert usage["prompt_tokens"] == len(PROMPT)
    healthy.wait_pools_empty()


def test_more_choices_than_a_worker_runs_at_once(healthy):
    """64 is what workers run by default."""
    many, _ = choices(healthy.http, 70, prompt=PROMPT[:40])
    assert len(set(many)) == 70
    assert choices(healthy.http, 5, prompt=PROMPT[:40])[0] == many[:5]


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(healthy):
    prompts = [PROMPT[:50], PROMPT[50:150]]
    both, usage = choices(healthy.http, 3, prompt=prompts)
    assert both == [*choices(healthy.http, 3, prompt=prompts[0])[0], *choices(healthy.http, 3, prompt=prompts[1])[0]]
    assert usage["prompt_tokens"] == 150
    assert usage["completion_tokens"] == 6 * SAMPLED["max_tokens"]


@pytest.mark.parametrize("headers", [None, LOCAL])
def test_a_stream_brings_the_same_choices_side_by_side(healthy, headers):
    texts, ended, order = [""] * 4, [], []
    body = body_of(PROMPT, n=4, stream=True, **SAMPLED)
    with healthy.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        found = list(events(response))
    assert found[-1] == DONE
    for chunk in found[:-1]:
        for choice in json.loads(chunk)["choices"]:
            texts[choice["index"]] += choice["text"]
            order.append(choice["index"])
            if choice["finish_reason"]:
                ended.append(choice["index"])
    assert texts == choices(healthy.http, 4)[0]
    assert sorted(ended) == [0, 1, 2, 3]
    assert order != sorted(order), "one after the other"


def test_a_stop_string_in_one_choice_ends_no_other(healthy):
    """Cut after what each choice begins with: the one that has the string ends there, whichever it is."""
    whole, _ = choices(healthy.http, 4)
    for index in (0, 3):
        stop = whole[index][:1]
        found, _ = choices(healthy.http, 4, stop=[stop])
        assert found == [text.partition(stop)[0] for text in whole]
    healthy.wait_pools_empty()


@pytest.mark.parametrize("headers", [None, LOCAL])
def test_all_choices_of_one_token(healthy, headers):
    whole, _ = choices(healthy.http, 6)
    one, usage = choices(healthy.http, 6, max_tokens=1, headers=headers)
    assert all(text.startswith(start) for text, start in zip(whole, one, strict=True))
    assert usage["completion_tokens"] == 6


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_dies_costs_no_choice(healthy, role):
    expected, _ = choices(healthy.http, 4, max_tokens=200)
    body = body_of(PROMPT, n=4, stream=True, **SAMPLED | {"max_tokens": 200})
    texts = [""] * 4
    with healthy.http.stream("POST", "/v1/completions", json=body) as response:
        found = events(response)
        for number, chunk in enumerate(found):
            if chunk == DONE:
                break
            payload = json.loads(chunk)
            assert "error" not in payload, payload
            for choice in payload["choices"]:
                texts[choice["index"]] += choice["text"]
            if number == 20:
                healthy.kill(role)
                wait_until(lambda: not healthy.is_ready(), within_s=10.0, what="the gateway has noticed")
                healthy.restart(role)
    assert texts == expected
