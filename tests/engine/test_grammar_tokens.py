"""Grammars through both schedulers and runners: handed over, resumed behind any token, and preempted, an output is what
an undisturbed run gives, and follows its grammar."""

import re
from itertools import pairwise

import pytest
from msgspec.structs import replace

from kvtransfer.request_parts import EndReason, RequestSpec, SamplingParams
from tests.colocated import Colocated
from tests.engine.two_roles import TwoRoles
from tests.grammar.made_grammars import regex
from tests.tiny_models import END_OF_TURN_ID, EOS_ID, make_tokenizer

PROMPT = tuple(5 + i * 7 % 300 for i in range(21))
FORM = r"([a-f][0-9]){5,12}!"
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def two_roles(tiny_checkpoint):
    return TwoRoles(tiny_checkpoint("llama3"))


def spec_of(number=0, form=FORM, **sampling) -> RequestSpec:
    params = SamplingParams(
        **{"max_tokens": 40, "seed": number, "temperature": 1.0, "grammar": regex(form), **sampling}
    )
    return RequestSpec(f"r{number}", 0, PROMPT[number % 5 :], params)


def text_of(token_ids) -> str:
    assert token_ids[-1] in (EOS_ID, END_OF_TURN_ID)
    return TOKENIZER.decode(token_ids[:-1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_over_both_roles_as_in_one(two_roles, tiny_checkpoint, temperature):
    spec = spec_of(temperature=temperature)
    handed_over = two_roles.run(spec)
    assert handed_over.reason is EndReason.STOP
    assert re.fullmatch(FORM, text_of(handed_over.token_ids))
    one = Colocated.load(tiny_checkpoint("llama3")).generate([spec.prompt_token_ids], [spec.sampling])
    assert one[0].token_ids == handed_over.token_ids


def test_resumed_behind_any_token(two_roles):
    spec = spec_of(3)
    whole = two_roles.run(spec).token_ids
    for cut in range(1, len(whole)):
        rest = two_roles.run(replace(spec, attempt=1, output_token_ids=tuple(whole[:cut])))
        assert (rest.token_ids, rest.reason) == (whole[cut:], EndReason.STOP), cut


def test_preempted_and_computed_again(two_roles):
    specs = [spec_of(number) for number in range(6)]
    roomy = two_roles.run_together(specs, 200, share_prefixes=False)
    tight = two_roles.run_together(specs, 9, share_prefixes=False)
    assert tight.num_preemptions > 0
    assert tight.token_ids == roomy.token_ids
    assert all(re.fullmatch(FORM, text_of(token_ids)) for token_ids in roomy.token_ids)


def test_its_length_ends_an_output_before_its_grammar_does(two_roles):
    cut = two_roles.run(spec_of(max_tokens=4))
    assert (len(cut.token_ids), cut.reason) == (4, EndReason.LENGTH)


def test_a_stop_token_ends_an_output_that_may_hold_it(two_roles):
    (zero,) = TOKENIZER.encode("0", add_special_tokens=False)
    found = two_roles.run(spec_of(form="[ab]0[cd]0", stop_token_ids=(zero,)))
    assert (found.token_ids[-1], found.reason) == (zero, EndReason.STOP)
    assert len(found.token_ids) == 2


def test_bad_words_and_allowed_token_ids_over_both_roles(two_roles):
    ids = tuple(range(40, 60))
    spec = spec_of(grammar=None, allowed_token_ids=ids, bad_words=((41,), (42, 43)), ignore_eos=True)
    found = two_roles.run(spec).token_ids
    assert set(found) <= set(ids) - {41}
    assert (42, 43) not in set(pairwise(found))
    assert len(found) == 40
