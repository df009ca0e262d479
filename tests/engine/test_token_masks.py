"""Rules on single tokens, as the sampler keeps them; and what becomes of a request that they leave no token."""

import random

import pytest
import torch
from msgspec.structs import replace

from engine.grammars import Grammars
from engine.sampler import NOTHING_LEFT, Sampler
from engine.token_masks import TokenMasks
from tests.engine.made_requests import request_with
from tests.grammar.made_grammars import digest, regex
from tests.tiny_models import END_OF_TURN_ID, EOS_ID, VOCAB_SIZE, make_tokenizer

EOS = frozenset({EOS_ID, END_OF_TURN_ID})
CPU = torch.device("cpu")
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    made = Grammars(folder, VOCAB_SIZE, EOS)
    yield made
    made.close()


@pytest.fixture
def masks(grammars):
    return TokenMasks(VOCAB_SIZE, grammars)


@pytest.fixture
def sampler(masks):
    return Sampler(VOCAB_SIZE, EOS, CPU, masks=masks)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def noise(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def may_follow(sampler, request, *, tries=40) -> set[int]:
    """Tokens that are drawn at the request's next place, over many logits."""
    return {sampler(noise(1, seed), [request])[0] for seed in range(tries)}


def follow(sampler, request, num_steps=200) -> str:
    """The text that the request draws, up to its end; fails if there is none."""
    for step in range(num_steps):
        (token_id,) = sampler(noise(1, step), [request])
        if token_id in EOS:
            return TOKENIZER.decode(request.output_token_ids)
        request.output_token_ids.append(token_id)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_followed_to_its_end(sampler, temperature):
    request = request_with(temperature=temperature, grammar=regex("[a-f]{3}(xy)?"))
    assert follow(sampler, request) in {"".join(p) for p in all_outputs()}


def all_outputs():
    for a in "abcdef":
        for b in "abcdef":
            for c in "abcdef":
                yield from ((a, b, c), (a, b, c, "xy"))


def test_other_rows_keep_their_logits(sampler):
    plain, constrained = request_with(temperature=0.0), request_with(temperature=0.0, grammar=regex("q"))
    logits = noise(3)
    before = logits.clone()
    assert sampler(logits, [plain, constrained, plain]) == [
        int(logits[0].argmax()),
        ids_of("q")[0],
        int(logits[2].argmax()),
    ]
    assert torch.equal(logits, before)


def test_masks_that_were_begun_before_the_forward_are_the_same(sampler, masks, grammars):
    """Also when `begin` was for others, or came twice."""
    alone = Sampler(VOCAB_SIZE, EOS, CPU, masks=TokenMasks(VOCAB_SIZE, grammars))
    begun, plain = ([request_with(grammar=regex("[a-z]{100}"), seed=seed) for seed in range(4)] for _ in range(2))
    for step in range(8):
        masks.begin(begun if step % 3 else begun[:2])
        drawn = sampler(noise(4, step), begun)
        assert drawn == alone(noise(4, step), plain)
        for request, other, token_id in zip(begun, plain, drawn, strict=True):
            request.output_token_ids.append(token_id)
            other.output_token_ids.append(token_id)


def test_state_is_a_replay_of_the_output(sampler, grammars):
    """Whoever starts behind any token draws what the one that has followed from the beginning draws."""
    grammar = regex("([a-c][0-9]){6}")
    request = request_with(temperature=0.9, grammar=grammar, max_tokens=40)
    outputs = []
    for step in range(9):
        (token_id,) = sampler(noise(1, step), [request])
        fresh = Sampler(VOCAB_SIZE, EOS, CPU, masks=TokenMasks(VOCAB_SIZE, grammars))
        again = request_with(outputs, temperature=0.9, grammar=grammar, max_tokens=40)
        assert fresh(noise(1, step), [again]) == [token_id]
        outputs.append(token_id)
        request.output_token_ids.append(token_id)


def test_allowed_token_ids(sampler):
    assert may_follow(sampler, request_with(temperature=0.0, allowed_token_ids=(7, 40, 319))) == {7, 40, 319}


def test_a_bad_word_of_one_token_never_comes(sampler):
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 9], logits[0, 8] = 2.0, 1.0
    assert sampler(logits, [request_with(temperature=0.0, bad_words=((9,),))]) == [8]


@pytest.mark.parametrize(
    ("output", "wanted"), [((), 9), ((5,), 9), ((6,), 9), ((5, 6), 8), ((5, 6, 5), 9), ((1, 5, 6), 8)]
)
def test_a_bad_sequence_is_broken_at_its_last_token(sampler, output, wanted):
    """The prompt of `request_with` ends with 5, 6, which does not count."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 9], logits[0, 8] = 2.0, 1.0
    assert sampler(logits, [request_with(output, temperature=0.0, bad_words=((5, 6, 9), (9, 9)))]) == [wanted]


def test_rules_hold_together(sampler):
    a, b, c = (ids_of(letter)[0] for letter in "abc")
    request = request_with(temperature=0.0, grammar=regex("[a-c]"), allowed_token_ids=(b, c, EOS_ID), bad_words=((c,),))
    assert may_follow(sampler, request) == {b}
    assert a not in may_follow(sampler, request)


@pytest.mark.parametrize(
    "rules",
    [
        {"grammar": regex("a"), "bad_words": ((ids_of("a")[0],),)},
        {"grammar": regex("a"), "allowed_token_ids": (EOS_ID,), "bad_words": ((EOS_ID,),)},
        {"allowed_token_ids": (9,), "bad_words": ((9,),)},
        {"grammar": regex("a?"), "min_tokens": 3, "bad_words": ((ids_of("a")[0],),)},
    ],
)
def test_where_no_token_is_left_the_request_is_refused_and_no_other(sampler, masks, rules, caplog):
    stuck, well = request_with(**rules), request_with(temperature=0.0)
    logits = noise(2)
    assert sampler(logits, [stuck, well])[1] == int(logits[1].argmax())
    (reason,) = masks.take_refused().values()
    assert reason == NOTHING_LEFT or "allowed_token_ids holds no token" in reason
    assert masks.take_refused() == {}
    assert caplog.text == ""


def test_an_output_that_does_not_follow_is_refused(sampler, masks):
    for output in ([ids_of("z")[0]], [ids_of("a")[0], EOS_ID, ids_of("a")[0]]):
        request = request_with(output, grammar=regex("a+"))
        sampler(noise(1), [request])
        assert "the output so far does not follow it" in masks.take_refused()[request]
    request = request_with(grammar=regex("a+"))
    sampler(noise(1), [request])
    request.output_token_ids.append(ids_of("z")[0])  # what a lying prefill worker would say
    sampler(noise(1), [request])
    assert "can't be followed any further" in masks.take_refused()[request]


def test_another_vocabulary_is_refused(sampler, masks):
    request = request_with(grammar=replace(regex("a"), vocabulary="0" * 32))
    sampler(noise(1), [request])
    assert "give both the same --model" in masks.take_refused()[request]
    assert digest() != "0" * 32


def test_a_model_without_a_tokenizer_takes_no_grammars(tmp_path):
    masks = TokenMasks(VOCAB_SIZE, Grammars(tmp_path, VOCAB_SIZE, EOS))
    request = request_with(grammar=regex("a"))
    Sampler(VOCAB_SIZE, EOS, CPU, masks=masks)(noise(1), [request])
    assert "no readable tokenizer.json" in masks.take_refused()[request]


def test_a_rule_that_nobody_keeps_is_our_own_bug():
    with pytest.raises(AssertionError, match="nobody to keep them"):
        Sampler(VOCAB_SIZE, EOS, CPU)(noise(1), [request_with(allowed_token_ids=(1,))])


def test_many_rows_of_many_kinds_against_the_slow_twin(masks):
    """Row by row: the library's own answer for one matcher, and each rule by hand."""
    dice = random.Random(3)
    requests = [
        request_with(
            grammar=regex(dice.choice(["[a-z]+", "[0-9]{2,}", "(ab)*c"])) if dice.random() < 0.7 else None,
            allowed_token_ids=tuple(dice.sample(range(VOCAB_SIZE), 200)) if dice.random() < 0.5 else (),
            bad_words=tuple((dice.randrange(VOCAB_SIZE),) for _ in range(20)),
        )
        for _ in range(30)
    ]
    words = masks.fill(requests)
    for request, row in zip(requests, words, strict=True):
        if request in masks.refused:
            continue
        wanted = set(range(VOCAB_SIZE)) - {bad[0] for bad in request.sampling.bad_words}
        if request.sampling.allowed_token_ids:
            wanted &= set(request.sampling.allowed_token_ids)
        if request.sampling.grammar is not None:
            mask = masks._grammars.matcher_for(request_with(grammar=request.sampling.grammar)).compute_bitmask()
            wanted &= {i for i in range(VOCAB_SIZE) if mask[i // 8] >> (i % 8) & 1}
        assert {i for i in range(VOCAB_SIZE) if int(row[i // 32]) >> (i % 32) & 1} == wanted
