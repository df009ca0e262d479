"""A worker's loop around nothing: a role that holds what it is told to, and links that only listen.

Run as a program, it is a worker process that holds as many requests as its argument says, and never ends one.
"""

import sys

from kvtransfer.control import Report
from kvtransfer.mailbox import Mailbox
from kvtransfer.request_parts import EndReason, RequestEnd, RequestOutput
from kvtransfer.worker import Worker, stop_on_signals
from kvtransfer.worker_facts import LeaveCause, Load


class FakeRole:
    """Every request stays until it is cancelled or `finish`ed by the test."""

    def __init__(self) -> None:
        self.calls: list = []
        self.held: dict = {}
        self.outputs: list = []
        self.num_checks = 0
        self.num_steps = 0
        self.alive = True
        self.lends: set = set()  # requests that stay, once cancelled, until a transfer event names them
        self.on_step = lambda: False  # whether there is more to do right away

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def is_alive(self) -> bool:
        return self.alive

    def add(self, gateway, message, now) -> None:
        self.held[message.request.request_id] = gateway

    def cancel(self, gateway, message, now) -> None:
        self._end(message.request_id, EndReason.CANCELLED)

    def cancel_all_of(self, gateway, now) -> None:
        for request_id in [request_id for request_id, owner in self.held.items() if owner == gateway]:
            self._end(request_id, EndReason.CANCELLED)

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def on_transfer(self, event, now) -> None:
        self.calls.append(event)
        self.held.pop(event.key[0], None)

    def step(self) -> bool:
        self.num_steps += 1
        return bool(self.on_step())

    def flush(self):
        outputs, self.outputs = self.outputs, []
        return outputs

    def load(self) -> Load:
        return Load(len(self.held), 0, 0.5)

    def is_empty(self) -> bool:
        return not self.held

    def check_integrity(self) -> None:
        self.num_checks += 1

    def finish(self, request_id) -> None:
        self._end(request_id, EndReason.STOP)

    def _end(self, request_id, reason) -> None:
        if request_id in self.lends:
            return
        if gateway := self.held.pop(request_id, None):
            self.outputs.append((gateway, RequestOutput(request_id, 0, 0, end=RequestEnd(reason))))


class FakeLinks:
    """Keeps what the gateways would have been told."""

    def __init__(self) -> None:
        self.sent: list = []
        self.reports: list[Report] = []
        self.left: list[str] = []
        self.causes: list[LeaveCause] = []
        self.gateways = ("one", "other")
        self.on_leave = lambda: None
        self.started = 0
        self.alive = True

    def start(self) -> None:
        self.started += 1

    def is_alive(self) -> bool:
        return self.alive

    def report(self, report) -> None:
        self.reports.append(report)

    def send(self, gateway, outputs) -> None:
        self.sent.append((gateway, list(outputs)))

    def leave(self, reason, cause) -> None:
        self.left.append(reason)
        self.causes.append(cause)
        self.on_leave()


def main(num_held: int) -> int:
    role, inbox = FakeRole(), Mailbox()
    role.held = {f"r{number}": "gateway" for number in range(num_held)}
    role.on_step = lambda: print("step", role.num_steps, flush=True)
    stop_on_signals(inbox)
    return Worker(role, FakeLinks(), inbox, shutdown_timeout=60.0).run()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
