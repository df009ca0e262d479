"""Frames that are damaged, lost, or lost together with the words about them: found, never spliced, sent again."""

import random

import msgspec
import pytest

from kvtransfer.checksum import checksum, is_intact
from kvtransfer.codec import PROTOCOL_VERSION
from kvtransfer.frames import FrameOptions
from kvtransfer.incoming import ReceptionOutcome
from kvtransfer.intake import CREDITS_A_WINDOW
from kvtransfer.kv_messages import KvCredit, KvFirstToken, KvHeader, KvHello, KvOffer, KvResend
from kvtransfer.layout import KvBody
from kvtransfer.outgoing import TransferOutcome
from kvtransfer.receive_commands import Grant
from kvtransfer.send_commands import FirstToken
from kvtransfer.stream import MAX_RESENDS_IN_VAIN
from tests.kvtransfer.fake_pools import TOKEN_BYTES, DecodeSide, PrefillSide
from tests.kvtransfer.machine_world import KEEPALIVE, LEASE, PEER, MachineWorld, Sender, no_fault
from tests.kvtransfer.raw_peers import KEY, running, token_frame
from tests.kvtransfer.samples import FINGERPRINT, LAYOUT, LOGPROB

NUM_TOKENS = 24
WINDOW = 8 * TOKEN_BYTES
"""Four tokens of one layer: a transfer of NUM_TOKENS takes at least a dozen frames."""
CHECKED = FrameOptions(with_checksum=True)
CHUNK = 2
TOGETHER = FrameOptions(with_checksum=True, together_bytes=LAYOUT.num_layers * 2 * CHUNK * TOKEN_BYTES)
"""A chunk of all layers goes in one frame."""


def flipped(part: memoryview, at: int) -> memoryview:
    spoilt = bytearray(part)
    spoilt[at] ^= 1 << (at % 8)
    return memoryview(bytes(spoilt))


DAMAGE = {
    "first bit of K": lambda header, body: (header, KvBody(flipped(body.k, 0), body.v)),
    "last byte of K": lambda header, body: (header, KvBody(flipped(body.k, len(body.k) - 1), body.v)),
    "middle of V": lambda header, body: (header, KvBody(body.k, flipped(body.v, len(body.v) // 2))),
    "K and V swapped": lambda header, body: (header, KvBody(body.v, body.k)),
    "body cut short": lambda header, body: (header, KvBody(body.k[:-1], body.v)),
    "layer": lambda header, body: (msgspec.structs.replace(header, layer=1 - header.layer), body),
    "layer out of range": lambda header, body: (msgspec.structs.replace(header, layer=1 << 40), body),
    "start": lambda header, body: (msgspec.structs.replace(header, start=header.start + 1), body),
    "stop": lambda header, body: (msgspec.structs.replace(header, stop=header.stop + 64), body),
    "heads": lambda header, body: (msgspec.structs.replace(header, head_start=header.head_start + 1), body),
    "dtype": lambda header, body: (msgspec.structs.replace(header, dtype="float16"), body),
    "sent_bytes": lambda header, body: (msgspec.structs.replace(header, sent_bytes=1 << 40), body),
    "resend": lambda header, body: (msgspec.structs.replace(header, resend=header.resend + 9), body),
    "checksum": lambda header, body: (msgspec.structs.replace(header, checksum=header.checksum ^ 1), body),
    "attempt": lambda header, body: (msgspec.structs.replace(header, attempt=header.attempt + 1), body),
}


class Nth:
    """Does `harm` to the frames with these numbers, counted from 0; those from the end of the first go are negative."""

    def __init__(self, harm, *numbers) -> None:
        self.harm, self.numbers, self.seen = harm, numbers, -1

    def __call__(self, message, body):
        if not isinstance(message, KvHeader):
            return [(message, body)]
        self.seen += 1
        is_last = (message.layer, message.stop) == (LAYOUT.num_layers - 1, NUM_TOKENS)
        if self.seen in self.numbers or (-1 in self.numbers and is_last and message.resend == 0):
            return self.harm(message, body)
        return [(message, body)]


def lose(message, body):
    return []


def damage(kind):
    return lambda message, body: [DAMAGE[kind](message, body)]


def transfer(fault, window=WINDOW, back_fault=no_fault, first_token=0) -> MachineWorld:
    """One transfer from start to end."""
    world = MachineWorld(Sender(fault, options=CHECKED), window=window, back_fault=back_fault)
    world.expect(KEY, NUM_TOKENS, first_token)
    world.senders[0].send_all(KEY, NUM_TOKENS)
    world.run(2000.0)
    return world


def transfer_in_chunks(fault, back_fault=no_fault) -> MachineWorld:
    """The same, all layers of a chunk at once: they travel together."""
    world = MachineWorld(Sender(fault, options=TOGETHER), window=1 << 20, back_fault=back_fault)
    (sender,) = world.senders
    world.expect(KEY, NUM_TOKENS)
    sender.open(KEY, NUM_TOKENS)
    for _ in range(4):  # until it is granted, if nothing is lost
        world.turn()
    for start in range(0, NUM_TOKENS, CHUNK):
        world.turn()
        sender.compute(KEY, range(start, start + CHUNK), world.now)
    sender.machine.apply(FirstToken(KEY, 7), world.now)
    world.run(2000.0)
    return world


# --- the checksum itself


def test_a_frame_as_it_was_sent_is_intact_and_one_without_a_checksum_is_taken_as_it_comes():
    header, body = token_frame(KEY, 0, 0)
    assert is_intact(header, body)
    signed = msgspec.structs.replace(header, checksum=checksum(header, body))
    assert is_intact(signed, body)
    assert checksum(signed, body) == signed.checksum, "it does not cover itself"


@pytest.mark.parametrize("kind", DAMAGE)
def test_no_damage_goes_unseen(kind):
    header, body = token_frame(KEY, 0, 0)
    signed = msgspec.structs.replace(header, checksum=checksum(header, body))
    assert not is_intact(*DAMAGE[kind](signed, body))


# --- one frame


@pytest.mark.parametrize("number", [0, 5, -1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_frame_is_found_never_spliced_and_sent_again(kind, number):
    world = transfer(Nth(damage(kind), number))
    world.check_arrived(KEY)
    (end,) = world.senders[0].ends
    assert end.outcome is TransferOutcome.DONE
    counts = world.machine.counts
    assert counts.num_corrupt == (0 if kind == "attempt" else 1), "a stranger's frame is dropped unread"
    assert world.machine.num_dropped == (1 if kind == "attempt" else 0)
    assert counts.num_resends >= 1
    assert counts.spliced_bytes == NUM_TOKENS * LAYOUT.num_layers * 2 * TOKEN_BYTES


@pytest.mark.parametrize(
    ("number", "window"), [(0, 1), (5, 1), (-1, 1), (0, WINDOW), (5, WINDOW), (-1, WINDOW), (0, 1 << 20), (-1, 1 << 20)]
)
def test_a_lost_frame_is_noticed_and_sent_again(number, window):
    world = transfer(Nth(lose, number), window)
    world.check_arrived(KEY)
    assert world.machine.counts.num_corrupt == 0
    assert world.machine.counts.num_resends >= 1


def test_damage_is_healed_at_once_and_waits_for_no_keepalive():
    """The window is a single token: unless the damaged one is settled and asked for, nothing more would come."""
    world = transfer(Nth(damage("middle of V"), 1), window=1, first_token=NUM_TOKENS - 2)
    world.check_arrived(KEY)
    assert world.machine.counts.num_corrupt == 1
    assert world.now < KEEPALIVE


def test_without_faults_nothing_is_asked_for_again():
    world = transfer(no_fault)
    world.check_arrived(KEY)
    counts = world.machine.counts
    assert (counts.num_corrupt, counts.num_stale, counts.num_resends) == (0, 0, 0)
    assert not [message for message in world.said if isinstance(message, KvResend)]


def test_losses_before_the_first_token_that_is_wanted_do_not_go_back_beyond_it():
    world = transfer(Nth(lose, 0), first_token=20)
    world.check_arrived(KEY)
    starts = [message.start for message in world.senders[0].outlet.sent if isinstance(message, KvHeader)]
    assert min(starts) == 20


# --- the books


@pytest.mark.parametrize("fault", [Nth(lose, 2, 3, 7), Nth(damage("middle of V"), 2, 3, 7)], ids=["lost", "damaged"])
def test_no_more_than_the_window_is_ever_on_its_way_and_all_bytes_are_settled(fault):
    world = MachineWorld(Sender(fault, options=CHECKED), window=WINDOW)
    (sender,) = world.senders
    world.expect(KEY, NUM_TOKENS)
    sender.send_all(KEY, NUM_TOKENS)
    while len(world.machine):
        world.turn()
        transfer = sender.machine._book.find(KEY)
        assert transfer is None or transfer.in_flight_bytes <= WINDOW
    world.run()
    world.check_arrived(KEY)
    assert WINDOW // 2 < sender.outlet.most_kv_bytes <= WINDOW
    headers = [message for message in sender.outlet.sent if isinstance(message, KvHeader)]
    total = sum((header.stop - header.start) * 2 * TOKEN_BYTES for header in headers)
    assert total - WINDOW <= credits_of(world)[-1] < total


def credits_of(world) -> list[int]:
    return [word.settled_bytes for word in world.said if isinstance(word, KvCredit)]


@pytest.mark.parametrize("num_windows", [1, 2, 5])
def test_credits_are_said_as_long_as_the_sender_may_have_to_wait_for_them(num_windows):
    """Not behind the last window: nobody is waiting for those."""
    total = NUM_TOKENS * LAYOUT.num_layers * 2 * TOKEN_BYTES
    world = transfer(no_fault, window=total // num_windows)
    world.check_arrived(KEY)
    said = credits_of(world)
    if num_windows == 1:
        assert said == []
    else:
        assert total - 2 * (total // num_windows) < said[-1] < total
        assert len(said) <= CREDITS_A_WINDOW * (num_windows - 1)


# --- words lost


def first(count, kind):
    """Loses the first messages of a kind."""
    seen: list = []

    def fault(message, body):
        if isinstance(message, kind) and len(seen) < count:
            seen.append(message)
            return []
        return [(message, body)]

    return fault


def test_a_lost_first_token_is_said_again():
    world = transfer(first(1, KvFirstToken))
    world.check_arrived(KEY)
    assert world.machine.counts.num_resends == 0


def test_the_first_token_s_log_probability_is_said_again_with_it():
    world = MachineWorld(Sender(fault=first(1, KvFirstToken)))
    world.expect(KEY, NUM_TOKENS)
    world.senders[0].send_all(KEY, NUM_TOKENS)
    world.senders[0].machine.apply(FirstToken(KEY, 7, LOGPROB), 0.0)
    world.run()
    world.check_arrived(KEY)
    assert world.ends[0].first_logprob == LOGPROB


def test_lost_resends_are_said_again():
    world = transfer(Nth(lose, 3), back_fault=first(2, KvResend))
    world.check_arrived(KEY)
    resends = [word for word in world.said if isinstance(word, KvResend)]
    assert resends[0] in resends[1:]
    assert world.machine.counts.num_resends == 2


def test_an_answer_lost_with_the_first_token_behind_it_is_asked_for_once_more():
    """The last frame is lost, its repetition as well, and both times the receiver hears of it through KvFirstToken."""

    def fault(message, body):
        is_last = isinstance(message, KvHeader) and message.stop == NUM_TOKENS and message.layer == 1
        return [] if is_last and message.resend < 2 else [(message, body)]

    world = transfer(fault, window=1 << 20)
    world.check_arrived(KEY)
    assert world.machine.counts.num_resends == 2


@pytest.mark.parametrize("options", [CHECKED, TOGETHER], ids=["each layer alone", "layers together"])
@pytest.mark.parametrize("seed", range(20))
def test_random_faults_both_ways_heal(seed, options):
    dice = random.Random(seed)
    kinds, harmed = [*DAMAGE], []

    def forth(message, body):
        if isinstance(message, KvHeader | KvFirstToken | KvOffer) and dice.random() < 0.15:
            harmed.append(message)
            return []
        if isinstance(message, KvHeader) and dice.random() < 0.15:
            harmed.append(message)
            return [DAMAGE[dice.choice(kinds)](message, body)]
        return [(message, body)]

    def back(message, body):
        return [] if dice.random() < 0.1 else [(message, body)]

    world = transfer(forth, dice.choice([1, WINDOW]), back) if options is CHECKED else transfer_in_chunks(forth, back)
    world.check_arrived(KEY)
    is_kv_harmed = any(isinstance(message, KvHeader) for message in harmed)
    assert is_kv_harmed or options is TOGETHER, "these seeds harm"
    assert (world.machine.counts.num_resends >= 1) == is_kv_harmed


def test_frames_alone_keep_a_reception_alive_and_silence_does_not():
    world = MachineWorld()
    machine = world.machine
    hello = KvHello(PROTOCOL_VERSION, *PEER, FINGERPRINT, LAYOUT)
    world.expect(KEY, 4)
    for message in (hello, KvOffer(*KEY, 4)):
        machine.on_message(b"prefill-0/g1/x", message, None, 0.0)
    world.pool.allocate(KEY, 4)
    machine.apply(Grant(KEY, 0), 0.0)
    for token in range(3):
        now = (token + 1) * 0.75 * LEASE
        machine.on_message(b"prefill-0/g1/x", *token_frame(KEY, 0, token), now)
        machine.sweep(now + 0.1)
        assert world.ends == []
    machine.sweep(now + 1.1 * LEASE)
    assert [end.outcome for end in world.ends] == [ReceptionOutcome.FAILED]


def test_a_window_that_is_lost_whole_is_noticed_long_before_the_next_keepalive():
    """Nothing comes behind it that could tell."""
    world = MachineWorld(Sender(Nth(lose, 0), keepalive=100.0, options=CHECKED), window=2 * TOKEN_BYTES)
    world.expect(KEY, NUM_TOKENS)
    world.senders[0].send_all(KEY, NUM_TOKENS)
    world.run(50.0)
    world.check_arrived(KEY)


def test_layers_that_travel_together_are_taken_apart_by_a_loss_and_arrive():
    fault = Nth(lose, 1)
    world = transfer_in_chunks(fault)
    world.check_arrived(KEY)
    (sender,) = world.senders
    headers = [message for message in sender.outlet.sent if isinstance(message, KvHeader)]
    assert {header.num_layers for header in headers if header.resend == 0} == {LAYOUT.num_layers}
    assert {header.num_layers for header in headers if header.resend > 0} == {1}
    assert world.machine.counts.num_resends == LAYOUT.num_layers


# --- too many


@pytest.mark.parametrize("harm", [lose, damage("first bit of K")], ids=["lost", "damaged"])
def test_a_layer_that_never_arrives_fails_its_transfer_with_a_reason_and_no_other(harm):
    def fault(message, body):
        return harm(message, body) if isinstance(message, KvHeader) and message.request_id == "r" else [(message, body)]

    world = MachineWorld(Sender(fault, options=CHECKED), window=WINDOW)
    (sender,) = world.senders
    for key in (KEY, ("other", 0)):
        world.expect(key, NUM_TOKENS)
        sender.send_all(key, NUM_TOKENS)
    world.run()
    by_key = {end.key: end for end in world.ends}
    reason = f"layer 0 was sent {MAX_RESENDS_IN_VAIN} times and never arrived whole"
    assert (by_key[KEY].outcome, by_key[KEY].reason) == (ReceptionOutcome.FAILED, reason)
    assert by_key["other", 0].outcome is ReceptionOutcome.ARRIVED
    ends = {end.key: (end.outcome, end.reason) for end in sender.ends}
    assert ends == {KEY: (TransferOutcome.REVOKED, reason), ("other", 0): (TransferOutcome.DONE, "")}


# --- threads and sockets


@pytest.mark.parametrize("number", [0, 4, -1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("kind", ["first bit of K", "middle of V", "layer", "lost"])
def test_damage_and_loss_heal_on_real_sockets(kind, number):
    fault = Nth(lose if kind == "lost" else damage(kind), number)
    with running(PrefillSide(keepalive=0.1, options=CHECKED), DecodeSide(window=WINDOW)) as (prefill, decode):
        dialer = prefill.sender._dialer
        send = dialer.send
        dialer.send = lambda peer, message, body=None: all(send(peer, *sent) for sent in fault(message, body))
        decode.expect(KEY, prefill.peer, NUM_TOKENS)
        prefill.send_all(KEY, decode.target, NUM_TOKENS)
        assert decode.end_of(KEY).outcome is ReceptionOutcome.ARRIVED
        assert prefill.end_of(KEY).outcome is TransferOutcome.DONE
        assert decode.receiver.counts.num_resends >= 1
        assert decode.receiver.counts.num_corrupt == (kind != "lost")
