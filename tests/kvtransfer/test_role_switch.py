"""The frame of a worker process that is told to switch its role: it drains, says Goodbye, and gives all blocks back."""

import time

import pytest

from kvtransfer.control import FromGateway
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import SwitchRole
from kvtransfer.outgoing import TransferEnded, TransferOutcome
from kvtransfer.request_parts import EndReason
from kvtransfer.worker import StopRequested
from kvtransfer.worker_facts import LeaveCause, Role
from tests.kvtransfer.test_worker import Process, end_of, request


def switchable(shutdown_timeout: float = 30.0) -> Process:
    process = Process(shutdown_timeout)
    process.worker.switches_from = Role.DECODE
    return process


def order(role: Role = Role.PREFILL, timeout_s: float | None = None) -> FromGateway:
    return FromGateway("one", SwitchRole(role, timeout_s))


def test_an_idle_worker_switches_at_once():
    process = switchable()
    assert process.run(process.post(order())) == 0
    assert process.links.left == ["switching to prefill"]
    assert process.links.causes == [LeaveCause.ROLE_SWITCH]
    assert process.worker.next_role is Role.PREFILL
    assert process.role.calls == ["start", "stop"]


def test_it_drains_first_and_turns_new_requests_away():
    process = switchable()
    code = process.run(
        process.post(request("old")),
        process.post(order(), request("new")),
        lambda: None,
        lambda: process.role.finish("old"),
    )
    assert (code, process.worker.next_role) == (0, Role.PREFILL)
    assert process.links.sent == [
        ("one", [end_of("new", EndReason.FAILED, "the worker is switching to prefill")]),
        ("one", [end_of("old", EndReason.STOP)]),
    ]
    assert [report.draining for report in process.links.reports] == [False, False, True, True], (
        "the order comes in the third turn"
    )


@pytest.mark.parametrize(("timeout_s", "shutdown_timeout"), [(0.05, 1000.0), (None, 0.05), (0.0, 1000.0)])
def test_what_does_not_end_in_time_is_dropped_behind_the_goodbye(timeout_s, shutdown_timeout):
    """Its gateway resumes it elsewhere: it must not hear of an end that was none."""
    process = switchable(shutdown_timeout)
    before = time.monotonic()
    code = process.run(process.post(request("a"), request("b", "other")), process.post(order(timeout_s=timeout_s)))
    assert time.monotonic() - before < 5.0
    assert (code, process.worker.next_role, process.role.held) == (0, Role.PREFILL, {})
    assert process.links.sent == []
    assert process.role.num_checks >= 1, "the books are right before the next role gets the pool"


def test_blocks_on_loan_are_waited_for():
    process = switchable()
    ended = TransferEnded(("a", 0), TransferOutcome.ABORTED)
    process.role.lends = {"a"}  # its blocks come back with `ended`
    process.links.on_leave = lambda: process.inbox.put(ended)
    code = process.run(process.post(request("a")), process.post(order(timeout_s=0.0)))
    assert (code, process.worker.next_role) == (0, Role.PREFILL)
    assert process.role.calls == ["start", ended, "stop"]


def test_blocks_that_do_not_come_back_end_the_process(monkeypatch, caplog):
    monkeypatch.setattr("kvtransfer.worker.RELEASE_WITHIN_S", 0.1)
    process = switchable()
    process.role.lends = {"a"}
    code = process.run(process.post(request("a")), process.post(order(timeout_s=0.0)))
    assert (code, process.worker.next_role) == (1, None)
    assert "can't let go of its requests" in caplog.text
    assert process.role.calls[-1] == "stop"


def test_a_signal_amid_a_switch_makes_it_a_shutdown():
    process = switchable(shutdown_timeout=0.2)
    before = time.monotonic()
    code = process.run(process.post(request("a")), process.post(order(timeout_s=1000.0)), process.post(StopRequested()))
    assert time.monotonic() - before < 5.0
    assert (code, process.worker.next_role) == (0, None)
    assert process.links.left == ["shutting down"]
    assert process.links.causes == [LeaveCause.SHUTDOWN]


def test_a_signal_while_blocks_are_waited_for_is_heard():
    process = switchable()
    process.role.lends = {"a"}
    process.links.on_leave = lambda: process.inbox.put(StopRequested())
    assert process.run(process.post(request("a")), process.post(order(timeout_s=0.0))) == 0
    assert process.worker.next_role is None


def test_an_order_behind_a_signal_changes_nothing():
    process = switchable()
    code = process.run(
        process.post(request("a")), process.post(StopRequested(), order()), lambda: process.role.finish("a")
    )
    assert (code, process.worker.next_role, process.links.left) == (0, None, ["shutting down"])


def test_the_first_order_counts():
    process = switchable()
    code = process.run(
        process.post(request("a")),
        process.post(order(timeout_s=1000.0), FromGateway("other", SwitchRole(Role.PREFILL, 0.0))),
        lambda: None,
        lambda: process.role.finish("a"),
    )
    assert (code, process.links.sent) == (0, [("one", [end_of("a", EndReason.STOP)])])


def test_the_role_that_it_has_is_no_switch():
    process = switchable()
    code = process.run(process.post(order(Role.DECODE)), lambda: None, process.post(StopRequested()))
    assert (code, process.worker.next_role, process.links.left) == (0, None, ["shutting down"])


def test_a_worker_that_can_not_switch_says_so_and_goes_on(caplog):
    process = Process()
    code = process.run(process.post(order()), lambda: None, process.post(StopRequested()))
    assert (code, process.worker.next_role, process.links.left) == (0, None, ["shutting down"])
    assert "that can't switch" in caplog.text
    assert not any(report.draining for report in process.links.reports[:-1])


def test_a_failed_engine_does_not_switch():
    process = switchable()

    def fail() -> None:
        raise RuntimeError("out of memory")

    assert process.run(process.post(request("a")), process.post(order()), fail) == 1
    assert process.worker.next_role is None


def test_a_closed_mailbox_keeps_what_is_inside_and_wakes_nobody():
    mailbox = Mailbox()
    mailbox.put("before")
    mailbox.close()
    mailbox.put("behind")
    mailbox.close()
    assert mailbox.drain() == ["before", "behind"]
