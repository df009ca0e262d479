"""Turns token ids that come one by one into text that never has to be taken back.

    prompt tokens | settled output tokens           | pending
    .......[context: last tokens whose text is out] | [tokens whose text is not out yet]

The text of the pending tokens is what decode(context + pending) has beyond decode(context): the context gives
sentencepiece-like tokenizers the right spaces, and none of its own text comes out again. Text that ends in U+FFFD may
be a character of which bytes are missing, so it waits for the next token.

Not `tokenizers.decoders.DecodeStream`: primed with a prompt that ends within a character, it repeats the prompt's
text, and without priming it loses the space at the start of a continuation.
"""

from collections.abc import Callable, Sequence
from typing import Final

REPLACEMENT: Final = "\ufffd"

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """The text of one choice. `decode` maps token ids to text and decides about special tokens.

    A character that the end of the output cuts off is dropped; so is a U+FFFD that the model wrote as the very last
    character, which looks the same. Bytes that are no UTF-8 come out as U+FFFD.
    """

    CONTEXT_TOKENS = 8
    MAX_BYTES_PER_CHAR = 4
    # A character has at most 4 bytes, hence tokens. What is unfinished for so long is garbage; decoding it again
    # with each token would take quadratic time.
    MAX_PENDING = 64

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._context = self._context_of(prompt_token_ids)
        self._context_text = decode(self._context)
        self._pending: list[int] = []
        self.num_pending_chars = 0  # of the text that is not out yet, those that are certain

    def push(self, token_id: int) -> str:
        """Takes one output token and returns the text that is complete with it, often empty."""
        self._pending.append(token_id)
        text = self._pending_text()
        is_settled = text != "" and not text.endswith(REPLACEMENT)
        if not is_settled and len(self._pending) < self.MAX_PENDING:
            self.num_pending_chars = len(text.rstrip(REPLACEMENT))
            return ""
        self._settle(text)
        return text

    def finish(self) -> str:
        """The output has ended: the rest of the text, without a character that was cut off."""
        text = self._pending_text().rstrip(REPLACEMENT) if self._pending else ""
        self._settle(text)
        return text

    def _pending_text(self) -> str:
        whole = self._decode(self._context + self._pending)
        if whole.startswith(self._context_text):
            return whole[len(self._context_text) :]
        # The context ended within a character, which is complete now: it belongs to the output as a whole.
        complete = self._context_text.rstrip(REPLACEMENT)
        if whole.startswith(complete):
            return whole[len(complete) :]
        return self._decode(self._pending)

    def _settle(self, text: str) -> None:
        """Text without tokens needs no new context: the old one still says whether a space is due."""
        if text:
            self._context, self._context_text = self._pending, self._decode(self._pending)
        self._pending = []
        self.num_pending_chars = 0

    def _context_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, from the start of a character on."""
        for length in range(self.CONTEXT_TOKENS, self.CONTEXT_TOKENS + self.MAX_BYTES_PER_CHAR):
            context = list(prompt[-length:])
            if not self._decode(context).startswith(REPLACEMENT):
                break
        return context
