"""Decode's end of the KV hand-over, in a thread of its own: KV is spliced off the step loop.

1. A prefill worker introduces itself (KvHello); one whose model or KV layout differs is refused with the difference.
2. The engine expects a transfer; prefill offers it. Once both are there, in whatever order, the engine is told
   (KvOffered) and reserves blocks, and prefill gets its grant: the first token wanted and a window in bytes.
3. Each frame is checked against the books and the pool's layout, then copied into blocks that the request owns.
   Credits go back as bytes are spliced.
4. With the last layer's last token and the first sampled token here, prefill gets KvDone and the engine ReceptionEnded.
   However a reception ends, the engine gets exactly one ReceptionEnded, after the last write: only then may it free.

What each command and message leads to is decided in `kvtransfer/receive_machine.py`.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

from kvtransfer.codec import RequestKey
from kvtransfer.incoming import KvOffered, PeerId, ReceptionEnded
from kvtransfer.intake import IntakeCounts, KvSink
from kvtransfer.kv_channel import KvListener
from kvtransfer.mailbox import Mailbox
from kvtransfer.receive_commands import Close, Expect, Grant, ReceiveCommand, ReceiverLimits
from kvtransfer.receive_machine import ReceiveMachine
from kvtransfer.worker_facts import Fingerprint, KvLayout, KvTraffic

MESSAGES_A_TURN = 4
"""What is taken before the words that answer it are sent: milliseconds of work, and less than a default window."""


class KvReceiver:
    """Takes KV for this decode worker. `events` takes what the engine has to know."""

    def __init__(
        self,
        listener: KvListener,
        identity: tuple[Fingerprint, KvLayout],
        generation: str,
        sink: KvSink,
        limits: ReceiverLimits,
        events: Mailbox[Any],
    ) -> None:
        self._listener = listener
        self._commands: Mailbox[ReceiveCommand | None] = Mailbox()  # None: stop
        self._events = events
        self._news: list[KvOffered | ReceptionEnded] = []
        self._machine = ReceiveMachine(identity, generation, sink, limits, listener.send, self._news.append)
        self._thread = threading.Thread(target=self._run, name="kv-receiver", daemon=True)
        self._stopping = False

    def __len__(self) -> int:
        """Open receptions."""
        return len(self._machine)

    @property
    def num_dropped(self) -> int:
        """Messages of attempts that are over, and of peers that did not introduce themselves."""
        return self._machine.num_dropped

    @property
    def counts(self) -> IntakeCounts:
        """What has come of the frames so far."""
        return self._machine.counts

    @property
    def traffic(self) -> KvTraffic:
        """What has come of the KV so far. From any thread."""
        return self._machine.traffic

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the receiver still runs: without it the engine must stop."""
        return self._thread.is_alive()

    def expect(self, key: RequestKey, peer: PeerId, num_tokens: int) -> None:
        """KV of `num_tokens` tokens will be offered by `peer`; answered by KvOffered, and at last by ReceptionEnded."""
        self._commands.put(Expect(key, peer, num_tokens))

    def grant(self, key: RequestKey, first_token: int) -> None:
        """Blocks are reserved for what was offered, and the tokens before `first_token` are there already."""
        self._commands.put(Grant(key, first_token))

    def close(self, key: RequestKey, reason: str) -> None:
        """Gives a reception up; answered by ReceptionEnded unless it has ended already."""
        self._commands.put(Close(key, reason))

    def stop(self, timeout: float = 2.0) -> None:
        self._commands.put(None)
        self._thread.join(timeout)
        if not self.is_alive():
            self._commands.close()

    def _run(self) -> None:
        self._listener.watch(self._commands)
        while not self._stopping:
            self._listener.poll(self._machine.sweep_interval)
            commands = self._commands.drain()
            self._turn(commands, time.monotonic())
        self._listener.close()

    def _turn(self, commands: Sequence[ReceiveCommand | None], now: float) -> None:
        for command in commands:
            if command is None:
                self._stopping = True
            else:
                self._machine.apply(command, now)
        for _ in range(MESSAGES_A_TURN):
            received = self._listener.receive()
            for link, word, body in received:
                self._machine.on_message(link, word, body, now)
            if not received:
                break
        self._machine.sweep(now)
        self._tell_engine()

    def _tell_engine(self) -> None:
        """At the end of the turn: whoever is woken takes the interpreter from this thread."""
        self._events.put_all(self._news)
        self._news.clear()
