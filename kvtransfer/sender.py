"""Prefill's end of the KV hand-over, in a thread of its own.

1. The engine opens a transfer; the sender dials the decode worker if it must (KvHello) and offers it (KvOffer).
2. While the engine computes, it reports layer after layer as ready. Whatever is granted (KvGrant) is gathered from the
   pool and shipped, oldest transfer first, never more than the window ahead of the receiver's credits (KvCredit).
3. The sampled first token goes behind the last piece (KvFirstToken); the receiver answers KvDone.
4. However a transfer ends, the engine gets exactly one TransferEnded, after the last read of the request's blocks: only
   then may it free them.

What each command and message leads to is decided in `kvtransfer/send_machine.py`.
"""

import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvtransfer.codec import RequestKey
from kvtransfer.curve import CurveKeys
from kvtransfer.emulated_link import EmulatedLink, LinkSpec
from kvtransfer.frames import PLAIN, FrameOptions
from kvtransfer.kv_channel import KvDialer
from kvtransfer.kv_messages import KvHello
from kvtransfer.link_name import new_link_name
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import DecodeTarget
from kvtransfer.outgoing import TransferEnded
from kvtransfer.request_parts import Drawn, TokenLogprob
from kvtransfer.send_commands import Abort, FirstToken, Open, Ready, SendCommand, SenderTiming
from kvtransfer.send_machine import MAX_PROBE_S, KvSource, SendMachine
from kvtransfer.worker_facts import KvTraffic


class KvSender:
    """Ships KV of this prefill worker to decode workers. `events` takes what the engine has to know.

    `link`: behave as if KV went over such a link.
    """

    def __init__(
        self,
        hello: KvHello,
        source: KvSource,
        events: Mailbox[Any],
        timing: SenderTiming,
        security: CurveKeys | None = None,
        options: FrameOptions = PLAIN,
        link: LinkSpec | None = None,
    ) -> None:
        self._idle_wait = min(timing.keepalive / 4, MAX_PROBE_S)
        self._commands: Mailbox[SendCommand | None] = Mailbox()  # None: stop
        self._dialer = KvDialer(new_link_name(hello.worker_id, hello.generation), security)
        self._emulated = None if link is None else EmulatedLink(link, self._dialer, random.Random(0))
        outlet = self._emulated or self._dialer
        self._events = events
        self._news: list[TransferEnded] = []
        self._machine = SendMachine(hello, source, outlet, self._news.append, timing, options)
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)
        self._stopping = False

    def __len__(self) -> int:
        """Open transfers."""
        return len(self._machine)

    @property
    def traffic(self) -> KvTraffic:
        """What has been sent so far. From any thread."""
        return self._machine.traffic

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the sender still runs: without it the engine must stop."""
        return self._thread.is_alive()

    def open(self, key: RequestKey, target: DecodeTarget, num_tokens: int) -> None:
        """Offers a request's KV to `target`."""
        self._commands.put(Open(key, target, num_tokens))

    def ready(self, layer: int, stops: Sequence[tuple[RequestKey, int]]) -> None:
        """KV of tokens [0, stop) of `layer` is in the pool, for each (key, stop)."""
        self._commands.put(Ready(layer, tuple(stops)))

    def first_token(
        self,
        key: RequestKey,
        token_id: int,
        logprob: TokenLogprob | None = None,
        siblings: Mapping[str, Drawn] | None = None,
    ) -> None:
        """The prompt is computed and its first token sampled; and that of each other choice, by request id."""
        self._commands.put(FirstToken(key, token_id, logprob, siblings or {}))

    def abort(self, key: RequestKey, reason: str, *, tell_peer: bool) -> None:
        """Gives a transfer up; answered by TransferEnded unless it has ended already."""
        self._commands.put(Abort(key, reason, tell_peer))

    def stop(self, timeout: float = 2.0) -> None:
        self._commands.put(None)
        self._thread.join(timeout)
        if not self.is_alive():
            self._commands.close()

    def _run(self) -> None:
        self._dialer.watch(self._commands)
        more = False
        while not self._stopping:
            self._dialer.poll(0.0 if more else self._patience(time.monotonic()))
            commands = self._commands.drain()
            more = self._turn(commands, time.monotonic())  # read behind: what a command says has happened by then
        self._dialer.close()

    def _patience(self, now: float) -> float:
        """Seconds to wait for something to happen."""
        due = None if self._emulated is None else self._emulated.next_due
        return self._idle_wait if due is None else min(self._idle_wait, max(0.0, due - now))

    def _turn(self, commands: Sequence[SendCommand | None], now: float) -> bool:
        if self._emulated is not None:
            self._emulated.advance(now)
        for command in commands:
            if command is None:
                self._stopping = True
            else:
                self._machine.apply(command, now)
        for peer, message in self._dialer.receive():
            self._machine.on_message(peer, message, now)
        more = self._machine.ship(now)
        self._tell_engine()
        return more

    def _tell_engine(self) -> None:
        """At the end of the turn: whoever is woken takes the interpreter from this thread."""
        self._events.put_all(self._news)
        self._news.clear()
