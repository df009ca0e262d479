"""Who may send KV: introductions, former lives, and those who fell silent."""

import msgspec

from kvtransfer import peers as peers_module
from kvtransfer.messages import PROTOCOL_VERSION, KvHello
from kvtransfer.peers import PeerBook
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT


def hello(worker_id: str = "p", generation: str = "g1", **changes) -> KvHello:
    fields = {"protocol": PROTOCOL_VERSION, "fingerprint": FINGERPRINT, "layout": LAYOUT} | changes
    return KvHello(worker_id=worker_id, generation=generation, **fields)


def book() -> PeerBook:
    return PeerBook((FINGERPRINT, LAYOUT))


def test_only_who_has_introduced_itself_is_known():
    peers = book()
    assert peers.heard_on(b"1", 0.0) is None
    assert peers.introduce(b"1", hello(), 0.0) is None
    assert peers.heard_on(b"1", 0.0) == ("p", "g1")
    assert peers.forget(b"1") == ("p", "g1")
    assert (peers.forget(b"1"), peers.heard_on(b"1", 0.0)) == (None, None)


def test_who_differs_is_told_how_and_a_known_link_keeps_its_peer():
    peers = book()
    peers.introduce(b"1", hello(), 0.0)
    other = msgspec.structs.replace(LAYOUT, head_dim=8)
    assert peers.introduce(b"1", hello("q", layout=other), 0.0) == "KV head_dim: 4 != 8"
    assert peers.heard_on(b"1", 0.0) == ("p", "g1")


def test_a_worker_is_on_its_latest_link_only():
    peers = book()
    peers.introduce(b"1", hello(), 0.0)
    peers.introduce(b"2", hello(generation="g2"), 0.0)
    assert (peers.heard_on(b"1", 0.0), peers.heard_on(b"2", 0.0), len(peers)) == (None, ("p", "g2"), 1)


def test_former_lives_of_workers_do_not_use_up_the_places(monkeypatch):
    """A worker's id has its process id inside, so that each start is another one."""
    monkeypatch.setattr(peers_module, "MAX_PEERS", 2)
    peers = book()
    for life in range(10):
        peers.forget_idle(moment=life - 1.0, busy=frozenset())
        assert peers.introduce(str(life).encode(), hello(f"p-{life}"), float(life)) is None
    assert peers.introduce(b"new", hello("p-new"), 10.0) == "2 prefill workers are connected already"
    assert len(peers) == 2


def test_who_speaks_or_transfers_is_not_forgotten():
    peers = book()
    for name in ("busy", "speaks", "idle"):
        peers.introduce(name.encode(), hello(name), 0.0)
    peers.heard_on(b"speaks", 5.0)
    peers.forget_idle(moment=5.0, busy={("busy", "g1")})
    assert [peers.heard_on(link, 6.0) for link in (b"busy", b"speaks", b"idle")] == [
        ("busy", "g1"),
        ("speaks", "g1"),
        None,
    ]
