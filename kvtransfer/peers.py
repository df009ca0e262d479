"""The prefill workers that a decode worker takes KV from, by the name of their link. No socket, tensor or clock.

A worker that is restarted comes back under another name, and the link of its former life just falls silent. So links
are forgotten that nothing is transferred on and nothing was heard on for long; `now` is seconds, monotonic.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvtransfer.incoming import PeerId
from kvtransfer.layout import describe_mismatch, our_identity
from kvtransfer.link_name import is_of
from kvtransfer.messages import Fingerprint, KvHello, KvLayout

MAX_PEERS = 1024


@dataclass
class _Peer:
    peer: PeerId
    heard_at: float


class PeerBook:
    """Who has introduced itself on which link, at most MAX_PEERS. `identity`: what this worker's pool holds."""

    def __init__(self, identity: tuple[Fingerprint, KvLayout]) -> None:
        self._identity = our_identity(*identity)
        self._peers: dict[bytes, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def introduce(self, link: bytes, hello: KvHello, now: float) -> str | None:
        """The sender of `hello` is on `link` from now on, and on no other; or why it is not let in."""
        if not is_of(link.decode("utf-8", "replace"), hello.worker_id, hello.generation):
            return "the worker id does not match the name of the connection"
        mismatch = describe_mismatch(self._identity, (hello.protocol, hello.fingerprint, hello.layout))
        if mismatch is not None:
            return mismatch
        for former in [former for former, known in self._peers.items() if known.peer[0] == hello.worker_id]:
            del self._peers[former]
        if link not in self._peers and len(self._peers) >= MAX_PEERS:
            return f"{MAX_PEERS} prefill workers are connected already"
        self._peers[link] = _Peer((hello.worker_id, hello.generation), now)
        return None

    def heard_on(self, link: bytes, now: float) -> PeerId | None:
        """Who speaks on `link`; None if it has not introduced itself."""
        known = self._peers.get(link)
        if known is None:
            return None
        known.heard_at = now
        return known.peer

    def forget(self, link: bytes) -> PeerId | None:
        """Whoever was on `link`, if anybody."""
        known = self._peers.pop(link, None)
        return None if known is None else known.peer

    def forget_idle(self, moment: float, busy: AbstractSet[PeerId]) -> None:
        """Forgets who has not been heard of since `moment`, except the busy."""
        for link, known in list(self._peers.items()):
            if known.heard_at < moment and known.peer not in busy:
                del self._peers[link]
