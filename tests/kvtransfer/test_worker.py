"""The frame of a worker process: how it serves, drains, and ends, and with which exit code."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtransfer.control import AllGatewaysRefused, FromGateway, GatewayLost
from kvtransfer.incoming import ReceptionEnded, ReceptionOutcome
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import Cancel, PrefillRequest
from kvtransfer.outgoing import TransferEnded, TransferOutcome
from kvtransfer.request_parts import EndReason, RequestEnd, RequestOutput
from kvtransfer.worker import LOAD_INTERVAL_S, StopRequested, Worker
from kvtransfer.worker_facts import LeaveCause, Load
from tests.kvtransfer.fake_role import FakeLinks, FakeRole
from tests.kvtransfer.samples import spec

ROOT = Path(__file__).parents[2]


class Process:
    """A worker whose loop runs here, driven by a script of one function a step."""

    def __init__(self, shutdown_timeout: float = 30.0) -> None:
        self.role, self.links, self.inbox = FakeRole(), FakeLinks(), Mailbox()
        self.worker = Worker(self.role, self.links, self.inbox, shutdown_timeout)

    def run(self, *script) -> int:
        """Runs one function of `script` in each step, and the loop until it ends by itself."""
        left = list(script)

        def on_step() -> bool:
            if left:
                left.pop(0)()
            assert self.role.num_steps < 100, "the loop does not end"
            return bool(left)

        self.role.on_step = on_step
        try:
            return self.worker.run()
        finally:
            assert not left, "the loop ended before the script"
            self.inbox.close()

    def post(self, *events):
        return lambda: [self.inbox.put(event) for event in events]


def request(request_id: str, gateway: str = "one") -> FromGateway:
    return FromGateway(gateway, PrefillRequest(spec(request_id), None))


def end_of(request_id: str, reason: EndReason, message: str = "") -> RequestOutput:
    return RequestOutput(request_id, 0, 0, end=RequestEnd(reason, message))


def test_an_idle_worker_stops_at_once_and_well():
    process = Process()
    assert process.run(process.post(StopRequested())) == 0
    assert process.links.left == ["shutting down"]
    assert process.links.causes == [LeaveCause.SHUTDOWN]
    assert process.links.started == 1
    assert process.role.calls == ["start", "stop"]


def test_a_draining_worker_turns_new_requests_away_and_lets_running_ones_end():
    process = Process()
    code = process.run(
        process.post(request("old")),
        process.post(StopRequested(), request("new")),
        lambda: None,
        lambda: process.role.finish("old"),
    )
    assert code == 0
    assert process.links.sent == [
        ("one", [end_of("new", EndReason.FAILED, "the worker is shutting down")]),
        ("one", [end_of("old", EndReason.STOP)]),
    ]
    assert [report.draining for report in process.links.reports[-2:]] == [True, True]
    assert process.links.reports[0].draining is False


def test_a_draining_worker_still_takes_cancellations():
    process = Process()
    code = process.run(
        process.post(request("old")),
        process.post(StopRequested(), FromGateway("one", Cancel("old", 0))),
    )
    assert code == 0
    assert process.links.sent == [("one", [end_of("old", EndReason.CANCELLED)])]


def test_draining_has_a_deadline():
    process = Process(shutdown_timeout=0.05)
    before = time.monotonic()
    assert process.run(process.post(request("stuck")), process.post(StopRequested())) == 0
    assert time.monotonic() - before < 5.0
    assert process.links.left == ["shutting down"]
    assert process.links.causes == [LeaveCause.SHUTDOWN]


def test_a_second_signal_stops_at_once():
    process = Process(shutdown_timeout=1000.0)
    code = process.run(
        process.post(request("stuck")), process.post(StopRequested()), lambda: None, process.post(StopRequested())
    )
    assert code == 0
    assert set(process.role.held) == {"stuck"}


def test_a_refusal_by_all_is_an_exit_code():
    process = Process()
    assert process.run(process.post(request("held")), process.post(AllGatewaysRefused())) == 1
    assert process.links.left == ["failed"]
    assert process.links.causes == [LeaveCause.FAILURE]
    assert process.role.calls[-1] == "stop"


@pytest.mark.parametrize("what", ["role", "links"])
def test_a_dead_thread_is_an_exit_code(what, caplog):
    process = Process()
    assert process.run(lambda: setattr(getattr(process, what), "alive", False)) == 1
    assert process.links.left == ["failed"]
    assert process.links.causes == [LeaveCause.FAILURE]
    assert "a thread of this worker has died" in caplog.text


def test_a_failed_engine_is_an_exit_code_and_leaves_properly(caplog):
    process = Process()

    def fail() -> None:
        raise RuntimeError("out of memory")

    assert process.run(fail) == 1
    assert process.links.left == ["failed"]
    assert process.links.causes == [LeaveCause.FAILURE]
    assert process.role.calls == ["start", "stop"]
    assert "out of memory" in caplog.text


def test_outputs_of_one_turn_go_out_as_one_message_a_gateway_in_order():
    process = Process()

    def finish_all() -> None:
        for request_id in ("c", "a", "b"):
            process.role.finish(request_id)

    code = process.run(
        process.post(request("a"), request("b", "other"), request("c")),
        lambda: None,
        finish_all,
        process.post(StopRequested()),
    )
    assert code == 0
    assert process.links.sent == [
        ("one", [end_of("c", EndReason.STOP), end_of("a", EndReason.STOP)]),
        ("other", [end_of("b", EndReason.STOP)]),
    ]


def test_a_lost_gateway_loses_its_own_requests_only():
    process = Process()
    code = process.run(
        process.post(request("a"), request("b", "other")),
        process.post(GatewayLost("one")),
        lambda: None,
        process.post(FromGateway("other", Cancel("b", 0))),
        process.post(StopRequested()),
    )
    assert code == 0
    assert process.links.sent == [
        ("one", [end_of("a", EndReason.CANCELLED)]),
        ("other", [end_of("b", EndReason.CANCELLED)]),
    ]


def test_transfer_events_reach_the_role():
    events = [TransferEnded(("r", 0), TransferOutcome.DONE), ReceptionEnded(("r", 0), ReceptionOutcome.CLOSED)]
    process = Process()
    assert process.run(process.post(*events), process.post(StopRequested())) == 0
    assert process.role.calls == ["start", *events, "stop"]


def test_the_books_are_checked_each_time_the_worker_falls_idle():
    process = Process()

    def expect_checks(number: int):
        def check() -> None:
            assert process.role.num_checks == number

        return check

    code = process.run(
        expect_checks(0),
        process.post(request("a")),
        lambda: process.role.finish("a"),
        expect_checks(1),
        process.post(request("b")),
        lambda: process.role.finish("b"),
        expect_checks(2),
        process.post(StopRequested()),
    )
    assert code == 0


def test_progress_moves_in_idle_turns_too_and_reports_carry_the_load():
    process = Process(shutdown_timeout=0.3)
    assert process.run(process.post(request("a"), StopRequested())) == 0
    progress = [report.progress for report in process.links.reports]
    assert progress == list(range(1, len(progress) + 1))
    assert len(progress) >= 3
    assert process.links.reports[-1].load == Load(1, 0, 0.5)


def test_a_busy_worker_looks_at_its_load_now_and_then_and_an_idle_one_each_time():
    process = Process()
    worker, role = process.worker, process.role
    now, looks = [0.0], []
    worker.clock = lambda: now[0]
    role.on_step = lambda: True
    for turn in range(20):
        now[0] = turn * LOAD_INTERVAL_S / 10
        process.inbox.put(request(f"r{turn}"))
        worker.turn()
        looks.append(process.links.reports[-1].load.num_running)
    assert looks == [1] * 10 + [11] * 10
    role.on_step = lambda: False
    for turn in range(20, 23):
        process.inbox.put(request(f"r{turn}"))
        worker.turn()
        assert process.links.reports[-1].load.num_running == turn + 1
    assert [report.progress for report in process.links.reports] == list(range(1, 24))
    process.inbox.close()


def start(num_held: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.kvtransfer.fake_role", str(num_held)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "step 1\n"
    return process


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_a_process(signum):
    with start(num_held=0) as process:
        process.send_signal(signum)
        assert process.wait(10) == 0


def test_signals_drain_a_busy_process_and_a_second_one_ends_it():
    with start(num_held=1) as process:
        steps = threading.Thread(target=process.stdout.read)
        steps.start()
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        steps.join()
