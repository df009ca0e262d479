"""Words that wait for the next frame to their peer. Pure: no socket, and no clock.

A frame of one word is that word; of several, a msgpack array of them, in the order in which they were said.
"""

from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

import msgspec

from kvtransfer.kv_messages import MAX_WORDS

Peer = TypeVar("Peer", bound=Hashable)

FULL_BYTES: Final = 64 << 10
"""Far below what a frame may have, because the last word may pass it: one for many choices takes as much again."""


class UnsaidWords(Generic[Peer]):
    """Of all peers that there are any for, encoded. `send` takes a frame for a peer; False: it can't now."""

    def __init__(self, send: Callable[[Peer, bytes], bool]) -> None:
        self._send = send
        self._words: dict[Peer, list[bytes]] = {}

    def __len__(self) -> int:
        """Peers that something is to be said to."""
        return len(self._words)

    def add(self, peer: Peer, word: bytes) -> bool:
        """Takes a word; False if there are too many already, which can't be said now."""
        if self._is_full(peer) and not self.say(peer):
            return False
        self._words.setdefault(peer, []).append(word)
        return True

    def say(self, peer: Peer) -> bool:
        """Sends what waits for `peer`, in one frame; True if nothing is left of it."""
        words = self._words.get(peer)
        if words is None:
            return True
        if not self._send(peer, _frame(words)):
            return False
        del self._words[peer]
        return True

    def say_all(self) -> None:
        for peer in [*self._words]:
            self.say(peer)

    def forget(self, peer: Peer) -> None:
        """What waits has nowhere to go."""
        self._words.pop(peer, None)

    def _is_full(self, peer: Peer) -> bool:
        words = self._words.get(peer, ())
        return len(words) == MAX_WORDS or sum(map(len, words)) >= FULL_BYTES


def _frame(words: list[bytes]) -> bytes:
    return words[0] if len(words) == 1 else msgspec.msgpack.encode([msgspec.Raw(word) for word in words])
