"""Who may send KV: introductions, former lives, and those who fell silent."""

import msgspec
import pytest

from kvtransfer import peers as peers_module
from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.kv_messages import KvHello
from kvtransfer.peers import PeerBook
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT


def hello(worker_id: str = "p", generation: str = "g1", **changes) -> KvHello:
    fields = {"protocol": PROTOCOL_VERSION, "fingerprint": FINGERPRINT, "layout": LAYOUT} | changes
    return KvHello(worker_id=worker_id, generation=generation, **fields)


def link(worker_id: str = "p", generation: str = "g1") -> bytes:
    return f"{worker_id}/{generation}/nonce".encode()


def book() -> PeerBook:
    return PeerBook((FINGERPRINT, LAYOUT))


def test_only_who_has_introduced_itself_is_known():
    peers = book()
    assert peers.heard_on(link(), 0.0) is None
    assert peers.introduce(link(), hello(), 0.0) is None
    assert peers.heard_on(link(), 0.0) == ("p", "g1")
    assert peers.forget(link()) == ("p", "g1")
    assert (peers.forget(link()), peers.heard_on(link(), 0.0)) == (None, None)


def test_who_differs_is_told_how_and_a_known_link_keeps_its_peer():
    peers = book()
    peers.introduce(link(), hello(), 0.0)
    other = msgspec.structs.replace(LAYOUT, head_dim=8)
    assert peers.introduce(link(), hello(layout=other), 0.0) == "KV head_dim: 4 != 8"
    assert peers.heard_on(link(), 0.0) == ("p", "g1")


@pytest.mark.parametrize("other", [link("q"), link(generation="g2"), link("p-1"), b"p", b"\xff/g1", b""])
def test_nobody_speaks_for_another_worker_or_another_start_of_it(other):
    peers = book()
    peers.introduce(link(), hello(), 0.0)
    assert peers.introduce(other, hello(), 0.0) == "the worker id does not match the name of the connection"
    assert (peers.heard_on(other, 0.0), peers.heard_on(link(), 0.0)) == (None, ("p", "g1"))


def test_a_worker_is_on_its_latest_link_only():
    peers = book()
    peers.introduce(link(), hello(), 0.0)
    peers.introduce(link(generation="g2"), hello(generation="g2"), 0.0)
    assert (peers.heard_on(link(), 0.0), peers.heard_on(link(generation="g2"), 0.0), len(peers)) == (
        None,
        ("p", "g2"),
        1,
    )


def test_former_lives_of_workers_do_not_use_up_the_places(monkeypatch):
    """A worker's id has its process id inside, so that each start is another one."""
    monkeypatch.setattr(peers_module, "MAX_PEERS", 2)
    peers = book()
    for life in range(10):
        peers.forget_idle(moment=life - 1.0, busy=frozenset())
        assert peers.introduce(link(f"p-{life}"), hello(f"p-{life}"), float(life)) is None
    assert peers.introduce(link("p-new"), hello("p-new"), 10.0) == "2 prefill workers are connected already"
    assert len(peers) == 2


def test_who_speaks_or_transfers_is_not_forgotten():
    peers = book()
    for name in ("busy", "speaks", "idle"):
        peers.introduce(link(name), hello(name), 0.0)
    peers.heard_on(link("speaks"), 5.0)
    peers.forget_idle(moment=5.0, busy={("busy", "g1")})
    assert [peers.heard_on(link(name), 6.0) for name in ("busy", "speaks", "idle")] == [
        ("busy", "g1"),
        ("speaks", "g1"),
        None,
    ]
