"""Messages of several frames through our own loops over a socket, against pyzmq's, which are slower and do the same."""

import contextlib

import pytest
import zmq

from kvtransfer.sockets import Bounds, configure, receive_now, send_now

SIZES = ([3], [3, 0, 5], [5, zmq.COPY_THRESHOLD - 1, zmq.COPY_THRESHOLD], [1 << 20, 7, 1 << 20, 1])


@contextlib.contextmanager
def pair(hwm=100, receive_hwm=None):
    context = zmq.Context()
    left, right = (context.socket(zmq.PAIR) for _ in range(2))
    configure(left, Bounds(hwm, 1 << 21, hwm))
    configure(right, Bounds(hwm, 1 << 21, receive_hwm or hwm))
    right.connect(f"tcp://127.0.0.1:{left.bind_to_random_port('tcp://127.0.0.1')}")
    try:
        assert left.poll(5000, zmq.POLLOUT), "not connected"
        yield left, right
    finally:
        context.destroy(linger=0)


def message_of(sizes) -> list[bytes | memoryview]:
    parts = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    return [parts[0], *(memoryview(bytearray(part)) for part in parts[1:])]


def receive(socket) -> list[bytes]:
    assert socket.poll(5000, zmq.POLLIN), "nothing came"
    return [frame.bytes for frame in receive_now(socket)]


@pytest.mark.parametrize("sizes", SIZES)
def test_what_our_loops_send_and_receive_is_what_pyzmq_does(sizes):
    with pair() as (left, right):
        expected = [bytes(part) for part in message_of(sizes)]
        assert send_now(left, message_of(sizes))
        assert right.poll(5000, zmq.POLLIN)
        assert right.recv_multipart() == expected
        right.send_multipart(message_of(sizes))
        assert receive(left) == expected


def test_messages_do_not_run_into_each_other():
    with pair() as (left, right):
        for sizes in SIZES * 2:
            assert send_now(left, message_of(sizes))
        for sizes in SIZES * 2:
            assert [len(part) for part in receive(right)] == sizes
        assert receive_now(right) is None


def test_a_full_queue_takes_nothing_of_a_message():
    with pair(hwm=4) as (left, right):
        sent = 0
        while send_now(left, [b"%d" % sent, memoryview(bytearray(1 << 20)), b"end"]):
            sent += 1
            assert sent < 1000, "the queue never fills"
        for number in range(sent):
            head, body, end = receive(right)
            assert (head, len(body), end) == (b"%d" % number, 1 << 20, b"end")
        assert not right.poll(100, zmq.POLLIN)


def test_large_frames_are_not_copied():
    """What is still queued shows a later change: that is why a sender's memory must stay as it is until it is gone."""
    with pair(receive_hwm=1) as (left, right):
        blocker = memoryview(bytearray(1 << 21))
        large, small = bytearray(zmq.COPY_THRESHOLD), bytearray(16)
        for _ in range(20):  # 40 MiB: more than the kernel takes while nobody reads
            assert send_now(left, [blocker])
        assert send_now(left, [memoryview(large), memoryview(small)])
        large[:], small[:] = b"x" * len(large), b"y" * len(small)
        for _ in range(20):
            receive(right)
        got_large, got_small = receive(right)
        assert got_large == bytes(large), "copied when it was sent"
        assert got_small == bytes(16), "small frames are copied at once"
