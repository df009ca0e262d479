"""Who is alive: the registry of workers, as a state machine without socket, clock or torch.

`now` is seconds on any monotonic clock. The life of a worker id, as seen from here:

              Hello that fits        silent, Goodbye, malformed or lost message, Hello anew
    unknown -------------------->  live  ---------------------------------------------------> unknown
       |                            |  ^
       | anything but Hello         |  | progress moves
       v                            v  |
    Reintroduce                   stalled: live, but gets no new requests

A worker that is told to switch its role gets none from that moment on, and comes back as another start of the same id.

All live workers serve the same model: the first to come sets it, and when the last has gone the next one sets it anew.

What is sent to a live worker is numbered here, and what comes is checked against its own numbers: where one is missing,
the worker is dropped, which fails its requests at once, and asked to introduce itself again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from msgspec import structs

from gateway.backend import ClusterStatus
from gateway.handshake import identity_fault, peer_fault, vocabulary_fault
from gateway.reactions import Departure, Reaction, Tick
from gateway.retired import RetiredStarts
from gateway.worker import Worker
from kvtransfer.errors import IdentityError, MessageError, SettingsError
from kvtransfer.link_name import worker_of
from kvtransfer.messages import (
    GatewayBeat,
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    Reintroduce,
    RequestMessage,
    StepOutput,
    Welcome,
    WorkerToGateway,
)
from kvtransfer.worker_facts import LeaveCause, Role


@dataclass(frozen=True)
class ClusterSettings:
    """Bounds on silence and size. Times in seconds.

    `tokenizer_vocab_size`: token ids that the gateway can make; a model with fewer is refused. None: not checked.
    """

    dead_after_s: float = 2.0
    stalled_after_s: float = 60.0
    beat_interval_s: float = 0.5
    max_workers: int = 1024
    tokenizer_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("dead_after_s", "stalled_after_s", "beat_interval_s", "max_workers"):
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name} must be positive, not {getattr(self, name)}")


class Cluster:
    """The live workers. `epoch` names this run of the gateway. Counts malformed messages in `num_malformed`."""

    def __init__(self, epoch: str, settings: ClusterSettings) -> None:
        self.epoch = epoch
        self.num_malformed = 0
        self._settings = settings
        self._workers: dict[str, Worker] = {}
        self._retired = RetiredStarts()
        self._last_tick: float | None = None
        self._next_beat = float("-inf")

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All live workers, by id, with their last load."""
        return tuple(self._workers[worker_id] for worker_id in sorted(self._workers))

    @property
    def max_workers(self) -> int:
        """That may be live at once."""
        return self._settings.max_workers

    @property
    def vocab_size(self) -> int | None:
        """Token ids of the served model; None while there is no worker."""
        return next((worker.hello.fingerprint.vocab_size for worker in self._workers.values()), None)

    def find(self, worker_id: str) -> Worker | None:
        """The live worker of this id."""
        return self._workers.get(worker_id)

    def is_live(self, worker_id: str, generation: str) -> bool:
        worker = self._workers.get(worker_id)
        return worker is not None and worker.generation == generation

    def capable(self, role: Role, now: float) -> tuple[Worker, ...]:
        """Live workers of `role` that make progress and take new requests, by id."""
        return tuple(worker for worker in self.workers if worker.role is role and self._is_capable(worker, now))

    def status(self, now: float, needs: Sequence[Role] = tuple(Role)) -> ClusterStatus:
        """Ready means that each role of `needs` has a capable worker. Clients see the reasons, so no worker is named in
        them."""
        reasons = tuple(f"no {role.value} worker can take requests" for role in needs if not self.capable(role, now))
        lengths = [worker.limits.max_model_len for worker in self.workers if worker.role in needs]
        max_model_len = None if reasons else min(lengths)
        ends = frozenset(token_id for worker in self.workers for token_id in worker.hello.eos_token_ids)
        return ClusterStatus(ready=not reasons, reasons=reasons, max_model_len=max_model_len, eos_token_ids=ends)

    def receive(self, sender: str, message: WorkerToGateway | MessageError, now: float) -> Reaction:
        """Takes one message (or what was wrong with it) that came on the connection named `sender`."""
        if isinstance(message, MessageError):
            return self._on_malformed(sender, message)
        if isinstance(message, Hello):
            return self._on_hello(sender, message, now)
        worker = self._on_link(sender)
        if worker is None or worker.generation != message.generation:
            return self._on_stranger(sender, message.generation)
        if isinstance(message, Goodbye):
            self._retired.add(worker.ref, "it has said goodbye")
            return Reaction(departed=self.drop(worker.worker_id, f"left: {message.reason}", message.cause))
        if worker.has_lost(message):
            return Reaction(reply=Reintroduce(self.epoch), departed=self.drop(worker.worker_id, "messages were lost"))
        if isinstance(message, Heartbeat):
            return self._update(worker.after(message, now))
        if isinstance(message, StepOutput):
            heard = self._update(worker.after_outputs(now))
            return replace(heard, outputs=message.outputs)
        assert_never(message)

    def numbered(self, worker_id: str, message: RequestMessage) -> RequestMessage | None:
        """`message` with the number it has to go out with; None if the worker isn't live."""
        worker = self._workers.get(worker_id)
        return None if worker is None else structs.replace(message, sequence=worker.num_sent + 1)

    def note_sent(self, worker_id: str) -> None:
        """A numbered message is on its way to a live worker."""
        worker = self._workers[worker_id]
        self._update(replace(worker, num_sent=worker.num_sent + 1))

    def note_switching(self, worker_id: str, role: Role) -> None:
        """A live worker has been told to take this role: it gets no new requests."""
        self._update(replace(self._workers[worker_id], switching_to=role))

    def tick(self, now: float) -> Tick:
        """Finds the dead and the stalled. To be called several times within `dead_after_s`."""
        self._forgive_own_pause(now)
        departed = [
            self._require(worker.worker_id, f"silent for {now - worker.heard_at:.1f} s")
            for worker in self.workers
            if now - worker.heard_at >= self._settings.dead_after_s
        ]
        stalled = [worker for worker in self.workers if self._has_stalled(worker, now) and not worker.is_stalled]
        for worker in stalled:
            self._update(replace(worker, is_stalled=True))
        return Tick(tuple(departed), tuple(stalled), self._due_beats(now))

    def link_to(self, worker_id: str) -> str | None:
        """Name of the connection of a live worker."""
        worker = self._workers.get(worker_id)
        return None if worker is None else worker.link

    def beat_to(self, worker_id: str) -> GatewayBeat:
        """Our sign of life for a live worker."""
        return GatewayBeat(self.epoch, self._workers[worker_id].num_sent)

    def drop(self, worker_id: str, reason: str, cause: LeaveCause = LeaveCause.FAILURE) -> Departure | None:
        """Forgets a worker; None if it isn't live."""
        worker = self._workers.pop(worker_id, None)
        return None if worker is None else Departure(worker, reason, cause)

    def drop_sender(self, sender: str, reason: str) -> Departure | None:
        """Forgets the live worker behind a connection, if there is one."""
        worker = self._on_link(sender)
        return None if worker is None else self.drop(worker.worker_id, reason)

    def _on_link(self, sender: str) -> Worker | None:
        worker = self._workers.get(worker_of(sender))
        return worker if worker is not None and worker.link == sender else None

    def _require(self, worker_id: str, reason: str) -> Departure:
        departure = self.drop(worker_id, reason)
        assert departure is not None, f"{worker_id} is not live"
        return departure

    def _update(self, worker: Worker) -> Reaction:
        self._workers[worker.worker_id] = worker
        return Reaction(worker=worker)

    def _on_malformed(self, sender: str, error: MessageError) -> Reaction:
        self.num_malformed += 1
        is_identity = isinstance(error, IdentityError)
        refused = Refused(str(error) if is_identity else f"{error}; run the same release everywhere")
        return Reaction(reply=refused, departed=self.drop_sender(sender, "sent a malformed message"))

    def _on_stranger(self, sender: str, generation: str) -> Reaction:
        """A worker that has said goodbye is let go in peace; any other is asked who it is."""
        worker_id = worker_of(sender)
        is_leaving = (worker_id, generation) in self._retired and worker_id not in self._workers
        return Reaction() if is_leaving else Reaction(reply=Reintroduce(self.epoch))

    def _on_hello(self, sender: str, hello: Hello, now: float) -> Reaction:
        holder = self._on_link(sender)
        if holder is not None and holder.hello == hello:
            self._update(holder.heard(now))
            return Reaction(reply=self._welcome(hello))  # said again before our Welcome came through
        fault = self._fault_of(sender, hello)
        if fault is not None:
            return Reaction(reply=Refused(fault))
        departed = self._replace(hello)
        worker = Worker(hello=hello, link=sender, heard_at=now, progress_at=now)
        self._workers[worker.worker_id] = worker
        return Reaction(reply=self._welcome(hello), departed=departed, joined=worker)

    def _welcome(self, hello: Hello) -> Welcome:
        return Welcome(self.epoch, hello.introduction)

    def _fault_of(self, sender: str, hello: Hello) -> str | None:
        """Why this introduction is refused; whoever holds the id keeps it."""
        checks: tuple[Callable[[], str | None], ...] = (
            lambda: identity_fault(sender, hello),
            lambda: self._registry_fault(sender, hello),
            lambda: vocabulary_fault(hello.fingerprint, self._settings.tokenizer_vocab_size),
            lambda: self._model_fault(hello),
        )
        return next((fault for check in checks if (fault := check()) is not None), None)

    def _model_fault(self, hello: Hello) -> str | None:
        """The others set what is served; the holder of the id doesn't count, as it would make room."""
        others = (worker for worker in self.workers if worker.worker_id != hello.worker_id)
        peer = next(others, None)
        return None if peer is None else peer_fault(hello, peer.hello)

    def _registry_fault(self, sender: str, hello: Hello) -> str | None:
        retired = self._retired.reason((hello.worker_id, hello.generation))
        if retired is not None:
            return f"this start of worker {hello.worker_id} is over: {retired}"
        holder = self._workers.get(hello.worker_id)
        if holder is not None and holder.role is not hello.role and not (holder.can_switch and hello.can_switch):
            return f"worker id {hello.worker_id} belongs to a live {holder.role.value} worker; choose another"
        if holder is not None and holder.generation == hello.generation and holder.link != sender:
            return f"this start of worker {hello.worker_id} is connected under another name"
        if holder is None and len(self._workers) >= self._settings.max_workers:
            return f"the gateway has {len(self._workers)} workers already, at most {self._settings.max_workers}"
        return None

    def _replace(self, hello: Hello) -> Departure | None:
        """The holder of the id makes room. The same generation introduces itself anew if it had given us up: then it
        has dropped what it had of ours, as a new start would."""
        holder = self._workers.get(hello.worker_id)
        if holder is not None and holder.generation != hello.generation:
            self._retired.add(holder.ref, "a newer worker has the same id; choose another id")
        return self.drop(hello.worker_id, "started anew")

    def _is_capable(self, worker: Worker, now: float) -> bool:
        return not worker.is_leaving and not self._has_stalled(worker, now)

    def _has_stalled(self, worker: Worker, now: float) -> bool:
        return worker.has_stalled(self._settings.stalled_after_s, now)

    def _forgive_own_pause(self, now: float) -> None:
        """After a pause of the gateway (SIGSTOP, a suspended host) everyone's messages wait unread in our own queue."""
        pause_s = 0.0 if self._last_tick is None else now - self._last_tick
        self._last_tick = now
        if pause_s >= self._settings.dead_after_s / 2:
            self._workers = {name: worker.forgiven(pause_s, now) for name, worker in self._workers.items()}

    def _due_beats(self, now: float) -> tuple[str, ...]:
        if now < self._next_beat:
            return ()
        self._next_beat = now + self._settings.beat_interval_s
        return tuple(sorted(self._workers))
