"""What a generation gives back, and how tokens become its text. Knows no torch.

Text and ends are those of the HTTP API: see `OutputText`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.detokenizer import Detokenizer
from engine.offline_sampling import SamplingParams
from engine.stops import StopScanner
from kvtransfer.messages import EndReason

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
    """Takes the tokens of one output as they come, until `finish_reason` says that it is over.

    The token that ends an output by itself (EOS, a stop token) counts, but is not shown, unless stops are. Stop strings
    count from token number `min_tokens` on, and after one nothing more counts.
    """

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.finish_reason: str | None = None
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._params = params
        self._scanner = StopScanner(params.stops, params.include_stop_str_in_output)
        self._detokenizer = Detokenizer(lambda ids: decode(ids, params.skip_special_tokens), prompt_token_ids)

    def push(self, token_ids: Sequence[int], end: EndReason | None) -> None:
        """The next tokens, with STOP or LENGTH behind the last one."""
        assert self.finish_reason is None, "tokens behind the end"
        hides_last = end is EndReason.STOP and not self._params.include_stop_str_in_output
        for index, token_id in enumerate(token_ids):
            self._token_ids.append(token_id)
            if hides_last and index == len(token_ids) - 1:
                break
            self._take(self._detokenizer.push(token_id))
            if self._scanner.is_hit:
                self.finish_reason = "stop"
                return
        if end is not None:
            self._take(self._detokenizer.finish())
            self._pieces.append(self._scanner.flush())
            self.finish_reason = "stop" if end is EndReason.STOP or self._scanner.is_hit else "length"

    def result(self, index: int) -> CompletionOutput:
        """The whole of it, once it is over."""
        assert self.finish_reason is not None, "the output has not ended"
        return CompletionOutput(index, "".join(self._pieces), tuple(self._token_ids), self.finish_reason)

    def _take(self, piece: str) -> None:
        counts = len(self._token_ids) >= self._params.min_tokens
        self._pieces.append(self._scanner.push(piece) if counts else piece)
