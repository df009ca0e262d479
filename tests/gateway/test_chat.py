"""`/v1/chat/completions`: what the model is asked, and what comes back."""

import pytest

from tests.gateway.http_world import ScriptedBackend, ids_of, make_world


def prompt_of(**fields):
    world = make_world()
    response = world.chat(**fields)
    assert response.status_code == 200, response.text
    return world.backend.calls[0][0]


def test_an_answer_has_openai_s_shape():
    answer = make_world().chat().json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    prompt = ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    num_tokens = len(ids_of("hello world")) + 1
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": num_tokens,
            "total_tokens": len(prompt) + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_the_template_of_the_checkpoint_is_used():
    assert prompt_of() == ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?", "refusal": None, "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
    ]
    expected = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nyes?<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
    )
    assert prompt_of(messages=messages) == ids_of(expected + "<|im_start|>assistant\n")
    assert prompt_of(messages=messages, add_generation_prompt=False) == ids_of(expected)


def test_variables_of_the_template_can_be_set():
    expected = ids_of("<|im_start|>user\nhi<|im_end|>\n[calm]<|im_start|>assistant\n")
    assert prompt_of(chat_template_kwargs={"mood": "calm"}) == expected


def test_an_answer_may_take_all_the_room_there_is():
    world = make_world()
    world.chat()
    prompt, sampling = world.backend.calls[0]
    assert sampling.max_tokens == 100 - len(prompt)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_by_both_names(field):
    world = make_world()
    world.chat(**{field: 7})
    assert world.backend.calls[0][1].max_tokens == 7


def test_a_chat_that_is_too_long_is_told_both_numbers():
    response = make_world().chat(messages=[{"role": "user", "content": "zq" * 60}])
    assert response.status_code == 400
    assert "100" in response.json()["error"]["message"]
    assert "120" not in response.json()["error"]["message"]  # the template's tokens count, too
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_the_template_s_own_refusal_is_told():
    response = make_world().chat(messages=[{"role": "assistant", "content": "hi"}])
    assert response.status_code == 400
    assert "an assistant can not begin" in response.json()["error"]["message"]


def test_messages_are_checked_without_workers_too():
    world = make_world(ScriptedBackend(reasons=("no decode worker",)))
    assert world.chat(messages=[]).status_code == 400
    assert world.chat().status_code == 503
