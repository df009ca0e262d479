"""What a generation gives back, and how tokens become its text. Knows no torch.

Text and ends are those of the HTTP API: see `ShownText`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.offline_sampling import SamplingParams
from engine.shown_text import ShownText
from kvtransfer.request_parts import EndReason

Decode = Callable[[Sequence[int], bool], str]
"""Token ids, and whether special tokens are left out, to text."""


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation. `token_ids` has the EOS or stop token that ended it, which `text` does not show;
    `finish_reason` is "stop" or "length"."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations. `prompt` is None if it was given as token ids; `num_cached`: prompt tokens whose
    KV an earlier prompt had left in the pool."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached: int


class OutputText:
    """Takes the tokens of one output as they come, until `finish_reason` says that it is over."""

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._text = ShownText(decode, prompt_token_ids, params.text_rules)

    @property
    def finish_reason(self) -> str | None:
        return self._text.finish_reason

    def push(self, token_ids: Sequence[int], end: EndReason | None) -> None:
        """The next tokens, with STOP or LENGTH behind the last one."""
        num_shown = self._text.num_shown(token_ids, end)
        for token_id in token_ids[:num_shown]:
            self._token_ids.append(token_id)
            self._pieces.append(self._text.push(token_id))
            if self.finish_reason is not None:
                return
        if end is not None:
            self._token_ids += token_ids[num_shown:]
            self._pieces.append(self._text.end(end, len(token_ids) - num_shown))

    def result(self, index: int) -> CompletionOutput:
        """The whole of it, once it is over."""
        assert self.finish_reason is not None, "the output has not ended"
        return CompletionOutput(index, "".join(self._pieces), tuple(self._token_ids), self.finish_reason)
