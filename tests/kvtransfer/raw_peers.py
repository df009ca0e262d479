"""Peers of the test's own making, which say whatever they like, and the frame that stops both sides of a hand-over."""

from contextlib import contextmanager

from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.kv_channel import KvDialer, KvListener
from kvtransfer.kv_messages import KvHeader, KvHello, KvOffer, KvWelcome
from kvtransfer.layout import FP8, KvBody
from kvtransfer.messages import DecodeTarget
from tests.kvtransfer.fake_pools import DecodeSide, PrefillSide, content, wait_until
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT

KEY = ("r", 0)


@contextmanager
def running(*sides):
    """Stops the sides at the end, well or not, and then everything must be empty."""
    try:
        yield sides[0] if len(sides) == 1 else sides
        for side in sides:
            assert (side.sender if isinstance(side, PrefillSide) else side.receiver).is_alive()
    finally:
        for side in sides:
            side.stop()
    for side in sides:
        side.check_at_rest()
        assert len(side.sender if isinstance(side, PrefillSide) else side.receiver) == 0
        side.events.close()


def token_frame(key, layer, token) -> tuple[KvHeader, KvBody]:
    header = KvHeader(*key, layer, token, token + 1, 0, LAYOUT.num_kv_heads, LAYOUT.dtype)
    return header, KvBody(*(memoryview(content(key, layer, part, token)) for part in (0, 1)))


class RawPeer:
    """A prefill worker of the test's own making: speaks whatever it likes."""

    def __init__(self, decode: DecodeSide, name="prefill-7", generation="g7", link=None, hello=True) -> None:
        self.peer = (name, generation)
        self._dialer = KvDialer(link or f"{name}/{generation}")
        self._dialer.dial("d", decode.target.kv_endpoint)
        if hello:
            self.send(KvHello(PROTOCOL_VERSION, name, generation, FINGERPRINT, LAYOUT))
            assert self.hear() == KvWelcome(decode.target.generation, (FP8,))

    def send(self, message, body=None) -> None:
        assert self._dialer.send("d", message, body)
        self._dialer.poll(0)

    def hear(self):
        heard: list = []

        def has_come() -> bool:
            self._dialer.poll(0.05)
            heard.extend(self._dialer.receive())
            return bool(heard)

        wait_until(has_come)
        assert len(heard) == 1, heard
        return heard[0][1]

    def hangs_up(self) -> None:
        self._dialer.close()


class FakeDecode:
    """A decode worker of the test's own making."""

    def __init__(self) -> None:
        self.listener = KvListener("127.0.0.1", 0)
        self.target = DecodeTarget("decode-9", "g9", self.listener.endpoint)
        self.heard: list = []
        self.link = b""

    def answer(self, *messages) -> None:
        """Waits for an offer, then says `messages`."""

        def has_come() -> bool:
            self.listener.poll(0.05)
            for link, message, _ in self.listener.receive():
                self.link = link
                self.heard.append(message)
            return any(isinstance(message, KvOffer) for message in self.heard)

        wait_until(has_come)
        for message in messages:
            self.listener.send(self.link, message)
        self.listener.poll(0)
