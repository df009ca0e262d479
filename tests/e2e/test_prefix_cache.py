"""A conversation over the pipeline: each turn is what Hugging Face generates, and more of its prompt is cached."""

import pytest

from tests.e2e.client import complete
from tests.e2e.reference import ReferenceModel, torch_threads

NUM_TURNS, ANSWER_TOKENS, BLOCK = 10, 8, 16
QUESTIONS = (
    "Hello! Please tell me something about the sea.",
    "And what lives there?",
    "How deep is it?",
    "Who has been down there?",
    "Name one ship.",
    "When did it sail?",
    "What is salt good for?",
    "How do tides work?",
    "Is the moon a part of that?",
    "Thank you. One last word?",
)


@pytest.fixture(scope="module")
def conversation(smollm2):
    """(prompt token ids, what transformers answers) turn by turn, each prompt with all that was said before."""
    with torch_threads(1):
        model = ReferenceModel(smollm2)
        turns, history = [], []
        for question in QUESTIONS:
            asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            history += model.tokenizer.encode(asked, add_special_tokens=False)
            reference = model.generate(history, ANSWER_TOKENS)
            turns.append((list(history), reference))
            history += reference.token_ids
    return turns


def cached(answer) -> int:
    return answer.usage["prompt_tokens_details"]["cached_tokens"]


def test_ten_turns_equal_transformers_and_each_finds_more_in_the_cache(cluster, conversation):
    assert min(reference.margin for _, reference in conversation) > 1e-3, "decided by more than rounding"
    assert cluster.http.post("/reset_prefix_cache").status_code == 200
    found = []
    for prompt, reference in conversation:
        answer = complete(cluster.http, prompt, max_tokens=ANSWER_TOKENS)
        assert answer.text == reference.text
        assert answer.num_tokens == len(reference.token_ids)
        found.append(cached(answer))
    assert len(found) == NUM_TURNS
    assert found[0] == 0
    assert found == sorted(found)
    for (prompt, _), (earlier, _), count in zip(conversation[1:], conversation, found[1:], strict=False):
        # What prefill computed for the turn before, in full blocks; the answer in between is on decode.
        assert count == len(earlier) // BLOCK * BLOCK <= len(prompt)
    cluster.wait_pools_empty()


def test_tenants_find_nothing_of_each_other_and_a_reset_empties_the_cache(cluster, conversation):
    prompt, reference = conversation[5]
    answers = [
        complete(cluster.http, prompt, max_tokens=ANSWER_TOKENS, cache_salt=salt) for salt in ("one", "one", "other")
    ]
    assert [cached(answer) > 0 for answer in answers] == [False, True, False]
    assert {answer.text for answer in answers} == {reference.text}
    assert cluster.http.post("/reset_prefix_cache").status_code == 200
    again = complete(cluster.http, prompt, max_tokens=ANSWER_TOKENS, cache_salt="one")
    assert (cached(again), again.text) == (0, reference.text)
    cluster.wait_pools_empty()
