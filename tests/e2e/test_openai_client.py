"""The official client works against us as it is."""

import openai
import pytest

from tests.e2e.cluster import MODEL_NAME

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as official:
        yield official


def test_a_streamed_chat_answer_names_paris(client):
    text, roles, finish_reasons, usage = "", [], [], None
    with client.chat.completions.create(
        model=MODEL_NAME,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    ) as chunks:
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                roles.append(choice.delta.role)
                finish_reasons.append(choice.finish_reason)
    assert "Paris" in text
    assert roles[0] == "assistant"
    assert [reason for reason in finish_reasons if reason] == [finish_reasons[-1]] == ["stop"]
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 4 <= usage.completion_tokens <= 32


def test_streamed_and_whole_chat_answers_are_equal(client):
    whole = client.chat.completions.create(model=MODEL_NAME, messages=QUESTION, temperature=0.8, seed=5, max_tokens=24)
    with client.chat.completions.create(
        model=MODEL_NAME, messages=QUESTION, temperature=0.8, seed=5, max_tokens=24, stream=True
    ) as chunks:
        streamed = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant"


def test_the_model_list_and_an_unknown_model(client):
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")


def test_log_probabilities_are_the_clients_own_types(client):
    fields = {"model": MODEL_NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    assert "".join(entry.token for entry in content).startswith(whole.choices[0].message.content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content), "greedy: the likeliest one"
    assert bytes(byte for entry in content for byte in entry.bytes).decode().startswith("The")
    with client.chat.completions.create(**fields, logprobs=True, top_logprobs=2, stream=True) as chunks:
        pieces = [choice.logprobs.content for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [entry for piece in pieces for entry in piece] == content


def test_a_completion_s_log_probabilities_and_echo(client):
    fields = {"model": MODEL_NAME, "prompt": "The capital of France is", "echo": True, "logprobs": 1}
    (choice,) = client.completions.create(**fields, max_tokens=0).choices
    assert choice.text == fields["prompt"] == "".join(choice.logprobs.tokens)
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    (choice,) = client.completions.create(**fields, max_tokens=1, temperature=0).choices
    assert choice.text == "".join(choice.logprobs.tokens)
    assert max(choice.logprobs.top_logprobs[-1].values()) == choice.logprobs.token_logprobs[-1]


def test_errors_are_the_clients_own_types(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL_NAME, prompt="x", max_tokens=0)
    assert caught.value.param == "max_tokens"
