"""`engine.offline.LLM`: the tokens of transformers and of the oracle, whatever the batch, the pool, an interrupt."""

import itertools
import signal

import pytest
import torch

from engine.errors import ArgumentTypeError, CapacityError, DeviceError, RejectedError, UsageError
from engine.loading import blocks_in
from engine.offline import AHEAD, LLM, SamplingParams
from engine.offline_config import OfflineConfig, called_by_keyword
from kvtransfer import request_parts
from kvtransfer.errors import SettingsError
from tests.colocated import Colocated
from tests.e2e.reference import ReferenceModel
from tests.kvtransfer.samples import LAYOUT
from tests.tiny_models import save_tiny_model

SETTINGS = {"dtype": "float32", "device": "cpu", "kv_cache_gib": 0.01}
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [[5 + (7 * i + 3 * i * i + n) % 300 for i in range(length)] for n, length in enumerate((1, 15, 33, 70, 200))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model("smollm2", tmp_path_factory.mktemp("offline"))


@pytest.fixture(scope="module")
def shared(folder):
    with LLM(folder, **SETTINGS) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    """Empty before and after, with nothing cached."""
    shared.reset_prefix_cache()
    yield shared
    assert_at_rest(shared)


def assert_at_rest(llm):
    role = llm._open.role
    assert role.is_empty()
    assert llm._open.engine.pool.num_used == 0
    role.check_integrity()


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def generate(llm, *arguments):
    return llm.generate(*arguments, use_tqdm=False)


def test_greedy_tokens_are_those_of_transformers(llm, folder):
    model = ReferenceModel(folder)
    outputs = generate(llm, PROMPTS, SamplingParams(max_tokens=24, temperature=0))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        reference = model.generate(prompt, 24)
        assert reference.margin > 1e-3
        (choice,) = output.outputs
        assert list(choice.token_ids) == reference.token_ids
        assert choice.finish_reason == reference.finish_reason
        assert choice.text.rstrip("\ufffd") == reference.text.rstrip("\ufffd")


def test_drawn_tokens_are_the_oracles_for_the_same_seeds(llm, folder):
    params = [SamplingParams(max_tokens=20, seed=seed, top_p=0.9, ignore_eos=True) for seed in range(len(PROMPTS))]
    sampling = [
        request_parts.SamplingParams(max_tokens=20, seed=seed, top_p=0.9, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    expected = Colocated.load(folder, kv_cache_gib=0.01).generate(PROMPTS, sampling)
    assert tokens(generate(llm, PROMPTS, params)) == [tuple(each.token_ids) for each in expected]


other_settings = pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "max_num_batched_tokens": 16},
        {"block_size": 32},
        {"enable_prefix_caching": False},
        {"kv_cache_gib": 0.001, "enable_prefix_caching": False},  # 116 blocks, and 280 are wanted: they take turns
    ],
)


@other_settings
def test_tokens_do_not_depend_on_the_settings_of_the_engine(llm, folder, settings):
    params = SamplingParams(max_tokens=50, temperature=0)
    model = ReferenceModel(folder)
    references = [model.generate(prompt, 50) for prompt in PROMPTS]
    assert min(reference.margin for reference in references) > 1e-3  # batches round their logits differently
    expected = [tuple(reference.token_ids) for reference in references]
    with LLM(folder, **{**SETTINGS, "max_model_len": 256, **settings}) as other:
        assert tokens(generate(other, PROMPTS * 8, params)) == expected * 8
        if "kv_cache_gib" in settings:
            assert other._open.role.load().num_preemptions > 0
        assert_at_rest(other)


@other_settings
def test_drawn_tokens_do_not_depend_on_them_either(llm, folder, settings):
    """2,000 draws: those of a seed are worth something only if the batch's company changes none of them."""
    prompts = PROMPTS * 8
    params = [SamplingParams(max_tokens=50, seed=seed, ignore_eos=True) for seed in range(len(prompts))]
    expected = tokens(generate(llm, prompts, params))
    with LLM(folder, **{**SETTINGS, "max_model_len": 256, **settings}) as other:
        assert tokens(generate(other, prompts, params)) == expected
        if "kv_cache_gib" in settings:
            assert other._open.role.load().num_preemptions > 0


def test_results_are_in_the_order_of_the_prompts(llm):
    lengths = [9, 1, 5, 30, 2, 7]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    outputs = generate(llm, [[10, 11, 12 + i] for i in range(len(lengths))], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert [output.prompt_token_ids[-1] for output in outputs] == [12 + i for i in range(len(lengths))]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_text_token_ids_and_lists_of_either(llm):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("the quick fox")
    (text,) = generate(llm, "the quick fox", GREEDY)
    (one,) = generate(llm, ids, GREEDY)
    several = generate(llm, ["the quick fox", ids], GREEDY)
    assert text.prompt == "the quick fox"
    assert one.prompt is None
    assert text.prompt_token_ids == one.prompt_token_ids == tuple(ids)
    assert tokens([text]) == tokens([one]) == tokens(several[:1]) == tokens(several[1:])


def test_a_prompt_that_begins_like_an_earlier_one_finds_its_kv(llm):
    assert generate(llm, PROMPTS[4], GREEDY)[0].num_cached == 0
    (again,) = generate(llm, [*PROMPTS[4], 7], GREEDY)
    assert again.num_cached == 192  # of 201: whole blocks of 16 of the earlier 200
    llm.reset_prefix_cache()
    assert generate(llm, [*PROMPTS[4], 7], GREEDY)[0].num_cached == 0


def test_a_chat_is_its_prompt_in_the_models_template(llm):
    chat = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "a request"}]
    system = [{"role": "system", "content": "be brief"}, chat[1]]
    text = llm.get_tokenizer().apply_chat_template(system, tokenize=False, add_generation_prompt=True)
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    (one,) = llm.chat(chat, GREEDY, use_tqdm=False)
    assert one.prompt_token_ids == tuple(ids)
    assert tokens(llm.chat([chat, system], GREEDY, use_tqdm=False)) == tokens(generate(llm, [ids, ids], GREEDY))


def test_a_stop_string_ends_one_request_alone(llm):
    (whole,) = generate(llm, PROMPTS[2], GREEDY)
    stop = whole.outputs[0].text[3:6]
    cut = whole.outputs[0].text.index(stop)
    params = [SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop=stop), GREEDY]
    ended, other = generate(llm, [PROMPTS[2], PROMPTS[3]], params)
    assert ended.outputs[0].text == whole.outputs[0].text[:cut]
    assert ended.outputs[0].finish_reason == "stop"
    assert len(ended.outputs[0].token_ids) < 24
    assert tokens([other]) == tokens(generate(llm, PROMPTS[3], GREEDY))


def test_outputs_without_a_bound_end_at_the_models_length(folder):
    with LLM(folder, **SETTINGS, max_model_len=64) as llm:
        (output,) = generate(llm, PROMPTS[1], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 64 - 15


def test_a_seed_for_all_and_seeds_of_their_own(folder):
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    own = SamplingParams(max_tokens=12, ignore_eos=True, seed=0)
    with LLM(folder, **SETTINGS, seed=5) as llm:
        seeded = tokens(generate(llm, PROMPTS, free))
        assert seeded == tokens(generate(llm, PROMPTS, free))
        assert seeded != tokens(generate(llm, PROMPTS, own))
    with LLM(folder, **SETTINGS) as llm:
        assert tokens(generate(llm, PROMPTS, own)) == tokens(generate(llm, PROMPTS, own))
        assert tokens(generate(llm, PROMPTS, free)) != tokens(generate(llm, PROMPTS, free))


def test_jobs_are_taken_as_there_is_room(folder):
    with LLM(folder, **SETTINGS, max_num_seqs=2) as llm:
        taken = itertools.count()
        jobs = (llm.jobs.of_prompt([9, 10, 11 + next(taken) % 200], GREEDY) for _ in range(10**9))
        ended = llm.generate_each(jobs)
        seen = {next(ended)[0] for _ in range(20)}
        assert len(seen) == 20
        assert next(taken) <= 20 + AHEAD * 2 + 2  # those of the last step have ended, and are not handed out yet
        with pytest.raises(UsageError, match="is generating"):
            generate(llm, [[1]])
        ended.close()
        assert_at_rest(llm)
        assert len(generate(llm, [[1], [2]], GREEDY)) == 2


class InterruptedRunner:
    """Interrupts this process in the middle of a step."""

    def __init__(self, runner, at_step):
        self._runner = runner
        self._steps = itertools.count()
        self._at_step = at_step

    def step(self, rows):
        if next(self._steps) == self._at_step:
            signal.raise_signal(signal.SIGINT)
        return self._runner.step(rows)


@pytest.mark.parametrize("at_step", [0, 1, 7])
def test_after_an_interrupt_all_is_as_before(llm, monkeypatch, at_step):
    expected = tokens(generate(llm, PROMPTS, GREEDY))
    engine = llm._open.engine
    with monkeypatch.context() as patched:
        patched.setattr(llm._open.role, "_compute", InterruptedRunner(engine.runner, at_step).step)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, PROMPTS, GREEDY)
    assert_at_rest(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tokens(generate(llm, PROMPTS, GREEDY)) == expected


def test_after_an_error_amid_a_run_all_is_as_before(llm, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(llm._open.role, "_compute", lambda rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(llm, PROMPTS, GREEDY)
    assert_at_rest(llm)
    assert len(generate(llm, PROMPTS, GREEDY)) == len(PROMPTS)


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        ([[5], []], None, "prompt 1: prompt: has no tokens"),
        ("", None, "prompt: has no tokens"),
        ([[5], [999]], None, "prompt 1: the prompt holds token id 999"),
        ([[5], [-1]], None, "prompt 1: prompt: at most"),
        ([5, "a"], None, "prompt: must be text or a list of token ids"),
        ([[5, True]], None, "prompt: must be text or a list of token ids"),
        ([[5]], [GREEDY, GREEDY], "1 prompts, but 2 sampling params"),
        ([[5] * 2000], None, "the prompt has 2000 tokens"),
        ([[5] * 1020], None, "make 1036, but the model's length is 1024"),
        ([[5]], SamplingParams(stop_token_ids=[400]), "stop_token_ids holds token id 400"),
        ("\ud800", None, "half a surrogate"),
    ],
)
def test_what_can_never_be_done_is_told_before_anything_is_computed(llm, monkeypatch, prompts, params, says):
    monkeypatch.setattr(llm._open.role, "_compute", lambda rows: pytest.fail("something was computed"))
    with pytest.raises(RejectedError, match=says):
        generate(llm, prompts, params)


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        (5, None, "prompts: must be .* not int"),
        (None, None, "prompts: must be .* not NoneType"),
        ({"prompt": "a"}, None, "prompts: must be .* not dict"),
        (b"a", None, "prompts: must be .* not bytes"),
        ((text for text in "ab"), None, "prompts: must be .* not generator"),
        ([{"prompt": "a"}], None, "prompt: must be text or a list of token ids"),
        (["a", 5], None, "prompt 1: prompt: must be text"),
        ("a", {"temperature": 0}, "sampling_params: must be .* not dict"),
        ("a", 0.5, "sampling_params: must be .* not float"),
        (["a", "b"], [GREEDY, None], "prompt 1: sampling_params: must be SamplingParams, not NoneType"),
        ("a", ["GREEDY"], "sampling_params: must be SamplingParams, not str"),
    ],
)
def test_arguments_of_wrong_types_are_told_before_anything_is_computed(llm, monkeypatch, prompts, params, says):
    monkeypatch.setattr(llm._open.role, "_compute", lambda rows: pytest.fail("something was computed"))
    with pytest.raises(ArgumentTypeError, match=says):
        generate(llm, prompts, params)


@pytest.mark.parametrize("value", ["hot", None, [1.0], object(), True])
def test_a_parameter_of_a_wrong_type_names_itself(value):
    with pytest.raises(RejectedError, match=r"^temperature: Expected float"):
        SamplingParams(temperature=value)


@pytest.mark.parametrize("chat", [5, None, "hello", {"role": "user", "content": "a"}])
def test_what_is_no_list_of_messages_is_told_so(llm, chat):
    with pytest.raises(ArgumentTypeError, match=f"messages: must be a chat.* not {type(chat).__name__}"):
        llm.chat(chat, use_tqdm=False)


def test_jobs_and_models_of_wrong_types(llm):
    with pytest.raises(ArgumentTypeError, match=r"jobs: must be .* not str"):
        list(llm.generate_each(["a"]))
    with pytest.raises(ArgumentTypeError, match="not int"):
        LLM(5)


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        ([], "must not be empty"),
        ([{"role": "robot", "content": "a"}], "Invalid enum value 'robot', at messages"),
        ([{"role": "user"}], "missing required field content"),
        ([{"role": "user", "content": "a", "tool_calls": []}], "unknown field tool_calls"),
    ],
)
def test_a_chat_that_is_none(llm, chat, says):
    with pytest.raises(RejectedError, match=says):
        llm.chat([chat], use_tqdm=False)


def test_nothing_to_do_is_done(llm):
    assert generate(llm, []) == []


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"block_size": 0}, SettingsError, "^block_size must be at least 1, not 0$"),
        ({"block_size": "16"}, SettingsError, "^block_size must be of type int, not str$"),
        ({"max_num_seqs": True}, SettingsError, "^max_num_seqs must be of type int, not bool$"),
        ({"max_num_batched_tokens": 0}, SettingsError, "^max_num_batched_tokens must be at least 1, not 0$"),
        ({"gpu_memory_utilization": 1.5}, SettingsError, "^gpu_memory_utilization must be at most 1"),
        ({"kv_cache_gib": float("nan")}, SettingsError, "^kv_cache_gib must be finite, not nan$"),
        ({"dtype": "int8"}, SettingsError, "^dtype must be one of .*, not 'int8'$"),
        ({"kv_cache_dtype": "--dtype"}, SettingsError, "^kv_cache_dtype must be one of .*, not '--dtype'$"),
        ({"model": ""}, SettingsError, "^model must not be empty$"),
        ({"model": "/nowhere/--model"}, SettingsError, "^model: there is no folder /nowhere/--model$"),
        ({"seed": 1 << 64}, SettingsError, "^seed must be at most "),
        ({"seed": 0.5}, SettingsError, "^seed must be of type int, not float$"),
        ({"max_model_len": 10**6}, SettingsError, "^max_model_len 1000000 is more than the model's"),
        ({"bloc_size": 16}, TypeError, "unexpected keyword argument 'bloc_size'"),
        ({"gateway": ("tcp://127.0.0.1:1",)}, TypeError, "unexpected keyword argument 'gateway'"),
    ],
)
def test_settings_that_are_wrong(folder, settings, error, says):
    with pytest.raises(error, match=says):
        LLM(**{"model": folder, "device": "cpu", **settings})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_called_by_its_keyword(folder):
    with pytest.raises(DeviceError, match=r"^device cuda: "):
        LLM(folder, device="cuda")


def test_advice_is_about_keywords():
    says = r"lower max_model_len or raise kv_cache_gib \(CPU\) or gpu_memory_utilization \(GPU\)$"
    with pytest.raises(CapacityError, match=says), called_by_keyword():
        blocks_in(0, LAYOUT, 64)


def test_settings_that_come_from_flags_are_called_so(folder):
    with pytest.raises(SettingsError, match=r"^--max-model-len 1000000 is more than"):
        LLM.of(OfflineConfig(model=str(folder), device="cpu", max_model_len=10**6))


def test_a_closed_one_says_so(folder):
    llm = LLM(folder, **SETTINGS)
    llm.close()
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        generate(llm, [[1]])


def test_the_bar_counts_prompts(llm, capsys):
    llm.generate(PROMPTS, GREEDY)
    assert "5/5" in capsys.readouterr().err
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
