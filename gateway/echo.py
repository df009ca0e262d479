"""The prompt as a part of its answer, and where each of its tokens begins in there."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.detokenizer import REPLACEMENT, Detokenizer
from gateway.tokenizer import Tokenizer


@dataclass(frozen=True)
class Echo:
    """`offsets`: of each prompt token in `text`, in characters; empty if nobody asks for them."""

    text: str
    offsets: tuple[int, ...] = ()


def echo_of(tokenizer: Tokenizer, token_ids: Sequence[int], given: str | None, *, with_offsets: bool) -> Echo:
    """`given`: the text that `token_ids` were made of; None: they are the prompt, and special ones among them are
    shown. Takes time in proportion to the prompt, so it is for the text pool."""
    if not with_offsets:
        return Echo(given if given is not None else _decode(tokenizer, token_ids).rstrip(REPLACEMENT))
    starts, whole = _pieces(tokenizer, token_ids)
    text = whole if given is None else given
    # What the tokenizer has put before the text (BOS) is not in it, and begins where it does.
    extra = len(whole) - len(text) if whole.endswith(text) else 0
    return Echo(text, tuple(min(max(0, start - extra), len(text)) for start in starts))


def _pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[list[int], str]:
    """Where each token begins in the text of all of them, and that text."""
    detokenizer = Detokenizer(lambda ids: _decode(tokenizer, ids), ())
    starts, pieces, length = [], [], 0
    for token_id in token_ids:
        starts.append(length + detokenizer.num_pending_chars)
        pieces.append(detokenizer.push(token_id))
        length += len(pieces[-1])
    return starts, "".join([*pieces, detokenizer.finish()])


def _decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=False)
