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

from kvtransfer.errors import ProtocolError
from kvtransfer.kv_messages import KvHeader, KvResend
from kvtransfer.messages import Drawn, RequestKey, TokenLogprob

MAX_RESENDS_IN_VAIN = 16
"""Times a layer is asked for again without a single token of it arriving; then the transfer fails."""


class Verdict(Enum):
    """What to do with a frame."""

    NEXT = "next"  # splice it
    STALE = "stale"  # drop it: sent before its layer was asked for again
    GAP = "gap"  # drop it and ask for its layers again: what is before it in one of them was lost


@dataclass(slots=True)
class _Layer:
    """`resend`: number of the last KvResend for it, 0 if none; `waiting` for the answer; `in_vain`: KvResends since a
    token last arrived."""

    next: int
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
    _layers: list[_Layer] = field(default_factory=list)

    def grant(self, first_token: int) -> None:
        """Blocks are reserved, and the tokens before `first_token` are in the pool."""
        assert self.first_token is None, f"{self.key} was granted twice"
        assert 0 <= first_token <= self.num_tokens, (first_token, self.num_tokens)
        self.first_token = first_token
        self._layers = [_Layer(first_token) for _ in range(self.num_layers)]
        self.num_missing = (self.num_tokens - first_token) * self.num_layers

    def judge(self, header: KvHeader) -> Verdict:
        """What to do with a frame of the pool's layout. Raises ProtocolError for one that no loss explains."""
        if self.first_token is None:
            raise ProtocolError("KV came before its grant")
        if (header.head_start, header.head_stop) != self.heads:
            raise ProtocolError(f"KV heads [{header.head_start}, {header.head_stop}) on a link for {self.heads}")
        if header.num_layers == 1:
            return self._judge_layer(header, header.layer)
        verdicts = {self._judge_layer(header, layer) for layer in header.layers}
        return verdicts.pop() if len(verdicts) == 1 else Verdict.GAP

    def _judge_layer(self, header: KvHeader, index: int) -> Verdict:
        layer = self._layers[index]
        if header.resend > layer.resend or header.stop > self.num_tokens:
            raise ProtocolError(
                f"layer {index}: tokens [{header.start}, {header.stop}) of {self.num_tokens},"
                f" resend {header.resend} of {layer.resend}"
            )
        if header.resend < layer.resend:
            return Verdict.STALE
        if header.start < layer.next:
            raise ProtocolError(f"layer {index}: token {header.start} again, expected from {layer.next}")
        return Verdict.NEXT if header.start == layer.next else Verdict.GAP

    def lost_layers(self, header: KvHeader) -> list[int]:
        """What to ask for again when a frame judged GAP is dropped: its layers, but for those asked for already."""
        return [index for index in header.layers if header.resend == self._layers[index].resend]

    def spliced(self, header: KvHeader) -> None:
        """The tokens of a frame judged NEXT are in the pool."""
        for layer in self._layers[header.layer : header.layer + header.num_layers]:
            self.num_missing -= header.stop - layer.next
            layer.next, layer.waiting, layer.in_vain = header.stop, False, 0

    def settle(self, sent_bytes: int, num_bytes: int = 0) -> int:
        """A message with `num_bytes` of KV has come, sent behind `sent_bytes` of it; returns how many were lost."""
        lost = max(0, sent_bytes - self.settled_bytes)
        self.settled_bytes += lost + num_bytes
        return lost

    def ask_again(self, index: int) -> KvResend | None:
        """Asks for a layer from its next token on; None if that was in vain too often."""
        layer = self._layers[index]
        if layer.in_vain >= MAX_RESENDS_IN_VAIN:
            return None
        self.num_resends += 1
        layer.resend, layer.waiting, layer.in_vain = self.num_resends, True, layer.in_vain + 1
        return KvResend(*self.key, layer=index, start=layer.next, number=layer.resend)

    def missing_layers(self, num_heard: int) -> list[int]:
        """Layers that miss tokens, except those whose last KvResend the sender had not heard (it had `num_heard`)."""
        return [
            index
            for index, layer in enumerate(self._layers)
            if layer.next < self.num_tokens and not (layer.waiting and layer.resend > num_heard)
        ]

    def unheard_resends(self, num_heard: int) -> Iterator[KvResend]:
        """The KvResends that the sender had not heard of: on their way still, or lost."""
        for index, layer in enumerate(self._layers):
            if layer.waiting and layer.resend > num_heard:
                yield KvResend(*self.key, layer=index, start=layer.next, number=layer.resend)

    @property
    def uncredited_bytes(self) -> int:
        return self.settled_bytes - self.credited_bytes

    @property
    def has_all_kv(self) -> bool:
        return self.first_token is not None and self.num_missing == 0
