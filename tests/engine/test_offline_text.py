"""Offline text, tokens and fields are those of the HTTP API: twins of the gateway's, compared."""

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RejectedError
from engine.offline_output import OutputText
from engine.offline_sampling import SamplingParams
from engine.offline_tokenizer import OfflineTokenizer
from gateway.backend import TokenDelta
from gateway.choice_text import ChoiceRules, ChoiceText
from gateway.schemas import CompletionRequest
from gateway.tokenizer import Tokenizer
from kvtransfer.request_parts import EndReason
from tests.e2e.prompts import PROMPTS
from tests.tiny_models import VOCAB_SIZE, make_tokenizer

GATEWAYS = Tokenizer(make_tokenizer())
OURS = OfflineTokenizer(make_tokenizer())
TEXTS = [prompt.text for prompt in PROMPTS] + ["<|bos|>a<|im_end|>", "  ", "\u200d\U0001f469"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_texts_have_the_same_tokens(text, special):
    ids = OURS.encode(text, add_special_tokens=special)
    assert ids == GATEWAYS.encode(text, add_special_tokens=special)
    assert OURS.decode(ids, special) == GATEWAYS.decode(ids, skip_special_tokens=special)


def test_chats_have_the_same_text():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    for more in (True, False):
        ours = OURS.render_chat(chat, add_generation_prompt=more)
        assert ours == GATEWAYS.render_chat(chat, add_generation_prompt=more, variables={})


@given(
    ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30),
    stops=st.lists(st.text("the quickbrownfx", min_size=1, max_size=2), max_size=3),
    include=st.booleans(),
    skip=st.booleans(),
    min_tokens=st.integers(0, 5),
    end=st.sampled_from([EndReason.STOP, EndReason.LENGTH]),
)
def test_tokens_have_the_same_text_and_end(ids, stops, include, skip, min_tokens, end):
    rules = ChoiceRules(tuple(stops), include, skip, min_tokens)
    params = SamplingParams(
        max_tokens=None,
        stop=stops,
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
        min_tokens=min_tokens,
    )
    theirs = ChoiceText(0, [7, 8], GATEWAYS, rules)
    ours = OutputText(OURS.decode, [7, 8], params)
    deltas = []
    for index, token_id in enumerate(ids):
        finish = end if index == len(ids) - 1 else None
        deltas += theirs.push(TokenDelta((token_id,), finish))
        ours.push((token_id,), finish)
        assert (ours.finish_reason is not None) == theirs.is_finished
        if theirs.is_finished:
            break
    result = ours.result(0)
    assert result.text == "".join(delta.text for delta in deltas)
    assert result.finish_reason == deltas[-1].finish_reason
    assert len(result.token_ids) == sum(delta.num_tokens for delta in deltas)


def test_fields_have_the_apis_names_and_defaults():
    request = CompletionRequest(prompt="a")
    params = SamplingParams()
    for name in typing.get_type_hints(SamplingParams):
        default = getattr(params, name)
        theirs = getattr(request, name)
        if name == "max_tokens":  # the API's default stands with its endpoint
            assert (default, theirs) == (16, None)
        else:
            assert default == (tuple(theirs) if isinstance(theirs, list) else theirs), name


BAD = [
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", True),
    ("min_p", 1.5),
    ("repetition_penalty", 0.0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("logit_bias", {5: 101.0}),
    ("logit_bias", {5: float("nan")}),
    ("logit_bias", {"five": 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("seed", 1 << 63),
    ("min_tokens", -1),
    ("ignore_eos", 1),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["a"] * 17),
    ("stop", "a" * 513),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.0]),
    ("skip_special_tokens", None),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_what_the_api_refuses_is_refused_here_too(name, value):
    import msgspec

    from gateway.errors import InvalidFieldError
    from gateway.validation import convert

    with pytest.raises(RejectedError, match=f"^{name}: "):
        SamplingParams(**{name: value})
    if value is None or value != value or (isinstance(value, dict) and 5 in value) or value == float("inf"):
        return  # no JSON, or the API's word for leaving a field out
    with pytest.raises((InvalidFieldError, msgspec.ValidationError)):
        convert({"prompt": "a", name: value}, CompletionRequest)


def test_more_least_tokens_than_most():
    with pytest.raises(RejectedError, match="min_tokens: 17 is more than max_tokens"):
        SamplingParams(min_tokens=17)
    assert SamplingParams(min_tokens=17, max_tokens=None).min_tokens == 17


def test_fields_of_json():
    params = SamplingParams.of({"logit_bias": {"5": 3}, "stop": "a", "seed": 0})
    assert params == SamplingParams(logit_bias={5: 3.0}, stop="a", seed=0)
    with pytest.raises(RejectedError, match="'n': unknown sampling field"):
        SamplingParams.of({"n": 2})


def test_a_seed_of_zero_is_a_seed():
    assert SamplingParams(seed=0).for_prompt(1, 64, default_seed=5).seed == 0
    assert SamplingParams().for_prompt(1, 64, default_seed=0).seed == 0
