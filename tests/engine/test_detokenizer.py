"""Streamed text equals the whole text, for any tokens."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers

from engine.detokenizer import Detokenizer
from tests.gateway.http_world import byte_level_bpe, ids_of, tokenizer_of_world

TEXTS = st.text(max_size=20)
PROMPT = ids_of("hello")


def stream(decode, prompt, ids):
    detokenizer = Detokenizer(decode, prompt)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


def byte_level(skip=True):
    return partial(tokenizer_of_world().decode, skip_special_tokens=skip)


def sentencepiece_like() -> RawTokenizer:
    """Spaces are U+2581, the first one of a text is dropped, unknown characters fall back to their bytes."""
    words = ["▁hello", "▁world", "▁", "a", "b", "▁a"]
    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    vocab.update({word: 258 + index for index, word in enumerate(words)})
    tokenizer = RawTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


SENTENCEPIECE = sentencepiece_like()


def sp_ids(*tokens):
    return [SENTENCEPIECE.token_to_id(token) for token in tokens]


def bytes_of(text):
    return sp_ids(*(f"<0x{byte:02X}>" for byte in text.encode()))


@given(TEXTS)
def test_text_survives_the_stream(text):
    pieces = stream(byte_level(), PROMPT, ids_of(text))
    assert "".join(pieces) == text.rstrip("\ufffd")
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@given(st.lists(st.integers(0, byte_level_bpe().get_vocab_size() - 1), max_size=60), st.booleans())
def test_any_tokens_stream_to_what_they_decode_to(ids, skip):
    decode = byte_level(skip)
    assert "".join(stream(decode, PROMPT, ids)) == decode(ids).rstrip("\ufffd")


@given(st.text(min_size=1, max_size=8), TEXTS, st.integers(0, 30))
def test_output_continues_a_prompt_that_ends_anywhere(prompt, text, place):
    """Also within a character, which then comes whole with the output; nothing else of the prompt does."""
    ids = ids_of(prompt + text)
    place = 1 + place % len(ids)
    before = byte_level()(ids[:place]).rstrip("\ufffd")
    joined = "".join(stream(byte_level(), ids[:place], ids[place:]))
    if "\ufffd" not in prompt + text:
        assert joined == (prompt + text)[len(before) :] or place == len(ids)


def test_an_emoji_comes_whole():
    ids = ids_of("a👍b")
    assert len(ids) == 6
    assert stream(byte_level(), PROMPT, ids) == ["a", "", "", "", "👍", "b", ""]


def test_a_character_cut_off_at_the_end_is_dropped():
    ids = ids_of("ok👍")
    assert "".join(stream(byte_level(), PROMPT, ids[:-1])) == "ok"


def test_special_tokens_are_skipped_or_shown():
    ids = ids_of("a<|im_end|>b")
    assert "".join(stream(byte_level(skip=True), PROMPT, ids)) == "ab"
    assert "".join(stream(byte_level(skip=False), PROMPT, ids)) == "a<|im_end|>b"


@pytest.mark.parametrize("length", [63, 64, 65, 1000])
def test_garbage_without_end_is_shown_and_bounded(length):
    byte = byte_level_bpe().token_to_id("\u0122")  # the byte 0x80 on its own
    sizes = []

    def decode(ids):
        sizes.append(len(ids))
        return byte_level()(ids)

    pieces = stream(decode, PROMPT, [byte] * length + list(ids_of("ok")))
    assert "".join(pieces) == "\ufffd" * length + "ok"
    assert max(sizes) <= 2 * Detokenizer.MAX_PENDING


def test_sentencepiece_keeps_the_space_of_a_continuation():
    decode = partial(SENTENCEPIECE.decode, skip_special_tokens=True)
    assert stream(decode, sp_ids("▁hello"), sp_ids("▁world", "▁a", "b")) == [" world", " a", "b", ""]


def test_sentencepiece_skipped_tokens_do_not_eat_a_space():
    decode = partial(SENTENCEPIECE.decode, skip_special_tokens=True)
    assert "".join(stream(decode, sp_ids("▁hello"), sp_ids("▁world", "</s>", "▁a"))) == " world a"


def test_a_long_run_of_skipped_tokens_does_not_eat_a_space():
    decode = partial(SENTENCEPIECE.decode, skip_special_tokens=True)
    ids = sp_ids(*["</s>"] * (Detokenizer.MAX_PENDING + 5), "▁a")
    assert "".join(stream(decode, sp_ids("▁hello"), ids)) == " a"


@given(st.text("aéß日👍", max_size=8), st.text("aéß日👍", max_size=8))
def test_sentencepiece_byte_fallback(prompt, text):
    decode = partial(SENTENCEPIECE.decode, skip_special_tokens=True)
    pieces = stream(decode, [*sp_ids("▁hello"), *bytes_of(prompt)], bytes_of(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
