"""The prefill workers that a decode worker takes KV from, by the name of their link. No socket, tensor or clock.

A worker that is restarted comes back under another name, and the link of its former life just falls silent. So links
are forgotten that nothing is transferred on and nothing was heard on for long; `now` is seconds, monotonic.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvtransfer.incoming import HeadRange, PeerId, overlap
from kvtransfer.kv_messages import KvHello
from kvtransfer.layout import describe_mismatch, our_identity
from kvtransfer.link_name import is_of
from kvtransfer.worker_facts import Fingerprint, KvLayout

MAX_PEERS = 1024


@dataclass
class _Peer:
    peer: PeerId
    heads: HeadRange
    heard_at: float


class PeerBook:
    """Who has introduced itself on which link, at most MAX_PEERS. `identity`: what this worker's pool holds."""

    def __init__(self, identity: tuple[Fingerprint, KvLayout]) -> None:
        self._identity = our_identity(*identity)
        self._peers: dict[bytes, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def introduce(self, link: bytes, hello: KvHello, now: float) -> str | None:
        """The sender of `hello` is on `link` from now on, and for its KV heads on no other; or why it is not let in."""
        if not is_of(link.decode("utf-8", "replace"), hello.worker_id, hello.generation):
            return "the worker id does not match the name of the connection"
        mismatch = describe_mismatch(self._identity, (hello.protocol, hello.fingerprint, hello.layout))
        if mismatch is not None:
            return mismatch
        peer, heads = (hello.worker_id, hello.generation), heads_of(hello)
        if not 0 <= heads[0] < heads[1] <= hello.layout.num_kv_heads:
            return f"KV heads [{heads[0]}, {heads[1]}) of {hello.layout.num_kv_heads}"
        for former in [former for former, known in self._peers.items() if _is_replaced(known, peer, heads)]:
            del self._peers[former]
        taken = [known.heads for known in self._peers.values() if known.peer == peer and overlap(known.heads, heads)]
        if taken:
            return f"KV heads [{heads[0]}, {heads[1]}) are in part on another link of this worker: {taken[0]}"
        if link not in self._peers and len(self._peers) >= MAX_PEERS:
            return f"{MAX_PEERS} prefill workers are connected already"
        self._peers[link] = _Peer(peer, heads, now)
        return None

    def heard_on(self, link: bytes, now: float) -> PeerId | None:
        """Who speaks on `link`; None if it has not introduced itself."""
        known = self._peers.get(link)
        if known is None:
            return None
        known.heard_at = now
        return known.peer

    def heads_on(self, link: bytes) -> HeadRange:
        """KV heads that come on `link`, which has been introduced."""
        return self._peers[link].heads

    def forget(self, link: bytes) -> PeerId | None:
        """Whoever was on `link`, if anybody."""
        known = self._peers.pop(link, None)
        return None if known is None else known.peer

    def forget_idle(self, moment: float, busy: AbstractSet[PeerId]) -> None:
        """Forgets who has not been heard of since `moment`, except the busy."""
        for link, known in list(self._peers.items()):
            if known.heard_at < moment and known.peer not in busy:
                del self._peers[link]


def heads_of(hello: KvHello) -> HeadRange:
    """KV heads that come on the link which begins with `hello`."""
    return hello.head_start, hello.layout.num_kv_heads if hello.head_stop is None else hello.head_stop


def _is_replaced(known: _Peer, peer: PeerId, heads: HeadRange) -> bool:
    """Whether a link is over now that `peer` brings `heads` on a new one: its worker was restarted, or dialled anew."""
    return known.peer[0] == peer[0] and (known.peer != peer or known.heads == heads)
