"""Words that wait for the next frame to their peer. Pure: no socket, and no clock."""

from collections.abc import Hashable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from kvtransfer.kv_messages import MAX_WORDS

Peer = TypeVar("Peer", bound=Hashable)

FULL_BYTES: Final = 64 << 10
"""Far below what a frame may have, because the last word may pass it: one for many choices takes a tenth of a frame."""


class UnsaidWords(Generic[Peer]):
    """Of all peers that there are any for, encoded."""

    def __init__(self) -> None:
        self._words: dict[Peer, list[bytes]] = {}

    @property
    def peers(self) -> list[Peer]:
        """Those that something is to be said to."""
        return [*self._words]

    def is_full(self, peer: Peer) -> bool:
        """Whether `frame` has to be sent before another word is added. It still has room for one `last`."""
        words = self._words.get(peer, ())
        return len(words) >= MAX_WORDS - 1 or sum(map(len, words)) >= FULL_BYTES

    def add(self, peer: Peer, word: bytes) -> None:
        assert not self.is_full(peer), f"{len(self._words[peer])} words wait for {peer!r}"
        self._words.setdefault(peer, []).append(word)

    def frame(self, peer: Peer, last: Sequence[bytes] = ()) -> bytes:
        """All that waits for `peer`, and behind it the one word that `last` may have."""
        words = [*self._words.get(peer, ()), *last]
        return words[0] if len(words) == 1 else msgspec.msgpack.encode([msgspec.Raw(word) for word in words])

    def forget(self, peer: Peer) -> None:
        """What waited has been sent, or has nowhere to go."""
        self._words.pop(peer, None)
