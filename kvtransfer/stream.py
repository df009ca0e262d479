"""What has arrived of a reception over one link, layer by layer, and what to ask for again. No socket, tensor or clock.

The tokens of one layer:

    |<- in our pool before -->|<-- spliced -->|<- next frame ->|
    0                    first_token         next          num_tokens

A link keeps the order, so a frame behind the next one means that frames were lost: with a cut link that came back, or
dropped for a checksum that did not fit. Their layer is asked for again from `next` on. What was sent before the answer
to that is stale: dropped, and told from the answer by the number of the KvResend that a frame names.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.codec import RequestKey
from kvtransfer.errors import ProtocolError
from kvtransfer.kv_messages import KvHeader, KvResend
from kvtransfer.request_parts import Drawn, TokenLogprob

MAX_RESENDS_IN_VAIN = 16
"""Times a layer is asked for again without a single token of it arriving; then the transfer fails."""


class Verdict(Enum):
    """What to do with a frame."""

    NEXT = "next"  # splice it
    STALE = "stale"  # drop it: sent before its layer was asked for again
    GAP = "gap"  # drop it and ask for its layers again: what is before it in one of them was lost


@dataclass(slots=True)
class _Asked:
    """A layer that was asked for again. `resend`: number of the last KvResend for it; `waiting` for the answer;
    `in_vain`: KvResends since a token last arrived."""

    resend: int = 0
    waiting: bool = False
    in_vain: int = 0


@dataclass(slots=True)
class IncomingStream:
    """One link's part of a reception: KV heads `heads` of tokens [first_token, num_tokens), in all layers. `last_sign`
    is the last time the link spoke of it, seconds."""

    key: RequestKey
    link: bytes
    heads: tuple[int, int]
    num_tokens: int
    num_layers: int
    last_sign: float
    first_token: int | None = None  # None: not granted yet
    settled_bytes: int = 0  # spliced, dropped or lost
    credited_bytes: int = 0
    first_token_id: int | None = None
    first_logprob: TokenLogprob | None = None
    siblings: Mapping[str, Drawn] = field(default_factory=dict)
    num_resends: int = 0
    num_missing: int = 0  # tokens, over all layers, once granted
    _next: list[int] = field(default_factory=list)  # of each layer, once granted
    _asked: dict[int, _Asked] = field(default_factory=dict)  # by layer: none, as long as nothing is lost

    def grant(self, first_token: int) -> None:
        """Blocks are reserved, and the tokens before `first_token` are in the pool."""
        assert self.first_token is None, f"{self.key} was granted twice"
        assert 0 <= first_token <= self.num_tokens, (first_token, self.num_tokens)
        self.first_token = first_token
        self._next = [first_token] * self.num_layers
        self.num_missing = (self.num_tokens - first_token) * self.num_layers

    def judge(self, header: KvHeader) -> Verdict:
        """What to do with a frame of the pool's layout. Raises ProtocolError for one that no loss explains."""
        if self.first_token is None:
            raise ProtocolError("KV came before its grant")
        if (header.head_start, header.head_stop) != self.heads:
            raise ProtocolError(f"KV heads [{header.head_start}, {header.head_stop}) on a link for {self.heads}")
        if self._is_plainly_next(header):
            return Verdict.NEXT
        verdicts = {self._judge_layer(header, layer) for layer in header.layers}
        return verdicts.pop() if len(verdicts) == 1 else Verdict.GAP

    def _is_plainly_next(self, header: KvHeader) -> bool:
        """What `_judge_layer` finds for each layer of almost every frame, in one comparison."""
        expected = self._next[header.layer : header.layer + header.num_layers]
        nothing_lost = not self._asked and header.resend == 0
        return nothing_lost and header.stop <= self.num_tokens and expected == [header.start] * header.num_layers

    def _judge_layer(self, header: KvHeader, index: int) -> Verdict:
        resend = self._resend_of(index)
        if header.resend > resend or header.stop > self.num_tokens:
            raise ProtocolError(
                f"layer {index}: tokens [{header.start}, {header.stop}) of {self.num_tokens},"
                f" resend {header.resend} of {resend}"
            )
        if header.resend < resend:
            return Verdict.STALE
        if header.start < self._next[index]:
            raise ProtocolError(f"layer {index}: token {header.start} again, expected from {self._next[index]}")
        return Verdict.NEXT if header.start == self._next[index] else Verdict.GAP

    def _resend_of(self, index: int) -> int:
        """Number of the last KvResend for a layer, 0 if none."""
        asked = self._asked.get(index)
        return 0 if asked is None else asked.resend

    def lost_layers(self, header: KvHeader) -> list[int]:
        """What to ask for again when a frame judged GAP is dropped: its layers, but for those asked for already."""
        return [index for index in header.layers if header.resend == self._resend_of(index)]

    def spliced(self, header: KvHeader) -> None:
        """The tokens of a frame judged NEXT are in the pool."""
        self._next[header.layer : header.layer + header.num_layers] = [header.stop] * header.num_layers
        self.num_missing -= header.num_rows
        for index in header.layers if self._asked else ():
            if asked := self._asked.get(index):
                asked.waiting, asked.in_vain = False, 0

    def settle(self, sent_bytes: int, num_bytes: int = 0) -> int:
        """A message with `num_bytes` of KV has come, sent behind `sent_bytes` of it; returns how many were lost."""
        lost = max(0, sent_bytes - self.settled_bytes)
        self.settled_bytes += lost + num_bytes
        return lost

    def ask_again(self, index: int) -> KvResend | None:
        """Asks for a layer from its next token on; None if that was in vain too often."""
        asked = self._asked.setdefault(index, _Asked())
        if asked.in_vain >= MAX_RESENDS_IN_VAIN:
            return None
        self.num_resends += 1
        asked.resend, asked.waiting, asked.in_vain = self.num_resends, True, asked.in_vain + 1
        return KvResend(*self.key, layer=index, start=self._next[index], number=asked.resend)

    def missing_layers(self, num_heard: int) -> list[int]:
        """Layers that miss tokens, except those whose last KvResend the sender had not heard (it had `num_heard`)."""
        return [
            index
            for index, start in enumerate(self._next)
            if start < self.num_tokens and not self._is_unheard(index, num_heard)
        ]

    def unheard_resends(self, num_heard: int) -> Iterator[KvResend]:
        """The KvResends that the sender had not heard of: on their way still, or lost."""
        for index in sorted(self._asked):
            if self._is_unheard(index, num_heard):
                yield KvResend(*self.key, layer=index, start=self._next[index], number=self._resend_of(index))

    def _is_unheard(self, index: int, num_heard: int) -> bool:
        asked = self._asked.get(index)
        return asked is not None and asked.waiting and asked.resend > num_heard

    @property
    def uncredited_bytes(self) -> int:
        return self.settled_bytes - self.credited_bytes

    @property
    def has_all_kv(self) -> bool:
        return self.first_token is not None and self.num_missing == 0
