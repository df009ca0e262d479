"""What of an output's tokens is shown as text, and how the output ends: over HTTP and in a program of one's own alike.
Knows no torch.

    token --detokenizer--> text that is complete --stop scanner, from token number `min_tokens` on--> text that is shown
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.detokenizer import Detokenizer
from engine.stops import StopScanner
from kvtransfer.request_parts import EndReason


@dataclass(frozen=True)
class TextRules:
    """What of the tokens is shown. Stop strings count from token number `min_tokens` on."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


class ShownText:
    """Takes the tokens of one output and gives its text, piece by piece, until it has a `finish_reason`.

    The token that ends an output by itself (EOS, a stop token) is the last one of those that come with STOP. It counts,
    but is not shown, unless the rules include stops. After a stop string nothing more counts.
    """

    def __init__(
        self, decode: Callable[[Sequence[int], bool], str], prompt_token_ids: Sequence[int], rules: TextRules
    ) -> None:
        """`decode`: token ids, and whether special tokens are left out, to text."""
        self.finish_reason: str | None = None  # "stop" or "length"
        self._num_tokens = 0
        self._num_chars = 0
        self._rules = rules
        self._scanner = StopScanner(rules.stops, rules.include_stop)
        self._detokenizer = Detokenizer(lambda ids: decode(ids, rules.skip_special_tokens), prompt_token_ids)

    @property
    def next_offset(self) -> int:
        """Where the next token begins in the text, shown or not, characters."""
        return self._num_chars + self._detokenizer.num_pending_chars

    @property
    def is_cut(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._scanner.is_hit

    def num_shown(self, token_ids: Sequence[int], end: EndReason | None) -> int:
        """How many of the next tokens may be shown, if `end` comes behind them."""
        hides_last = end is EndReason.STOP and bool(token_ids) and not self._rules.include_stop
        return len(token_ids) - hides_last

    def push(self, token_id: int) -> str:
        """What is shown with the next token; it may have been the last one."""
        assert self.finish_reason is None, "a token behind the end"
        self._num_tokens += 1
        text = self._scan(self._detokenizer.push(token_id))
        if self.is_cut:
            self.finish_reason = "stop"
        return text

    def end(self, end: EndReason, num_hidden: int) -> str:
        """The last of the text, behind `num_hidden` tokens that count and are not shown: what was held back until now.
        That may complete a stop string."""
        assert self.finish_reason is None, "a second end"
        self._num_tokens += num_hidden
        text = self._scan(self._detokenizer.finish()) + self._scanner.flush()
        self.finish_reason = "stop" if end is EndReason.STOP or self.is_cut else "length"
        return text

    def _scan(self, piece: str) -> str:
        """`piece` has become certain with the last token."""
        self._num_chars += len(piece)
        return self._scanner.push(piece) if self._num_tokens >= self._rules.min_tokens else piece
