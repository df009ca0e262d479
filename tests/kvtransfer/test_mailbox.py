"""The queue between threads: nothing lost, nothing doubled, no wake-up missed."""

import os
import resource
import select
import threading
import time

import pytest

from kvtransfer.mailbox import Mailbox


@pytest.fixture
def mailbox():
    made = Mailbox()
    yield made
    made.close()


def is_readable(mailbox) -> bool:
    return bool(select.select([mailbox.fileno()], [], [], 0)[0])


def test_items_come_out_in_order_and_once(mailbox):
    for item in range(5):
        mailbox.put(item)
    assert mailbox.drain() == [0, 1, 2, 3, 4]
    assert mailbox.drain() == []


def test_the_file_descriptor_is_readable_while_something_is_inside(mailbox):
    assert not is_readable(mailbox)
    mailbox.put(1)
    assert is_readable(mailbox)
    mailbox.drain()
    assert not is_readable(mailbox)


def test_waiting_ends_with_the_first_item(mailbox):
    threading.Timer(0.05, mailbox.put, ["late"]).start()
    before = time.monotonic()
    assert mailbox.wait(10.0) == ["late"]
    assert time.monotonic() - before < 5.0


def test_waiting_ends_with_the_time(mailbox):
    before = time.monotonic()
    assert mailbox.wait(0.05) == []
    assert 0.04 < time.monotonic() - before < 5.0
    assert mailbox.wait(0.0) == []


def test_more_items_than_the_pipe_holds(mailbox):
    for item in range(70_000):
        mailbox.put(item)
    assert mailbox.drain() == list(range(70_000))
    mailbox.put("next")
    assert mailbox.wait(5.0) == ["next"]


def test_many_threads_put_and_one_waits(mailbox):
    threads = [
        threading.Thread(target=lambda name=name: [mailbox.put((name, index)) for index in range(500)])
        for name in range(4)
    ]
    for thread in threads:
        thread.start()
    got: list[tuple[int, int]] = []
    deadline = time.monotonic() + 20
    while len(got) < 2000 and time.monotonic() < deadline:
        got += mailbox.wait(1.0)
    for thread in threads:
        thread.join()
    assert len(got) == 2000
    for name in range(4):
        assert [index for who, index in got if who == name] == list(range(500))


def test_ping_pong_never_misses_a_wake_up():
    ping, pong = Mailbox(), Mailbox()

    def echo() -> None:
        for _ in range(300):
            while not (items := ping.wait(5.0)):
                pass
            pong.put(items[0])

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    for turn in range(300):
        ping.put(turn)
        assert pong.wait(5.0) == [turn]
    thread.join(5.0)
    ping.close()
    pong.close()


def test_a_process_with_many_open_files_can_wait():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1100:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    boxes = [Mailbox() for _ in range(515)]
    try:
        assert boxes[-1].fileno() > 1023
        boxes[-1].put("here")
        assert boxes[-1].wait(1.0) == ["here"]
    finally:
        for box in boxes:
            box.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_closing_waits_for_a_wake_up_that_is_being_written(mailbox, monkeypatch):
    """Or else it goes into whichever file gets the pipe's number next."""
    written = []

    def write(file, data):
        closing = threading.Thread(target=mailbox.close)
        closing.start()
        closing.join(0.1)
        os.fstat(file)  # it is there still
        written.append(closing)

    monkeypatch.setattr(os, "write", write)
    mailbox.put("first")
    written[0].join(5.0)
    mailbox.put("second")
    assert len(written) == 1
    assert mailbox.drain() == ["first", "second"]
