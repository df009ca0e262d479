"""One live worker as the gateway knows it: a value; each message makes a new one. `now` is seconds, monotonic."""

from dataclasses import dataclass, field, replace

from kvtransfer.messages import Heartbeat, Hello, StepOutput
from kvtransfer.worker_facts import Limits, Load, Role

WorkerRef = tuple[str, str]
"""(worker id, generation): one start of a worker."""


def _nothing_to_do() -> Load:
    return Load(num_running=0, num_waiting=0, kv_usage=0.0)


@dataclass(frozen=True)
class Worker:
    """Who it said it is, the last that was heard of it, and the numbers of what went either way since its Welcome."""

    hello: Hello
    link: str  # name of its connection: where replies go
    heard_at: float
    progress_at: float  # when `progress` last moved; an idle engine moves it too
    progress: int = 0
    load: Load = field(default_factory=_nothing_to_do)
    num_sent: int = 0
    num_taken: int = 0
    is_stalled: bool = False  # as of the last tick
    is_draining: bool = False  # it finishes what it has and takes no new requests
    switching_to: Role | None = None  # we have told it to; it drains, leaves, and comes back as another start

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    @property
    def generation(self) -> str:
        return self.hello.generation

    @property
    def ref(self) -> WorkerRef:
        return (self.worker_id, self.generation)

    @property
    def role(self) -> Role:
        return self.hello.role

    @property
    def can_switch(self) -> bool:
        return self.hello.can_switch

    @property
    def is_leaving(self) -> bool:
        """Whether it takes no new requests, by its own word or by ours."""
        return self.is_draining or self.switching_to is not None

    @property
    def limits(self) -> Limits:
        return self.hello.limits

    def has_lost(self, message: Heartbeat | StepOutput) -> bool:
        """Whether step outputs before this message were lost on their way."""
        expected = self.num_taken + 1 if isinstance(message, StepOutput) else self.num_taken
        return message.sequence != expected

    def heard(self, now: float) -> "Worker":
        """This worker after a sign of life."""
        return replace(self, heard_at=now)

    def after_outputs(self, now: float) -> "Worker":
        """This worker after a step output."""
        return replace(self.heard(now), num_taken=self.num_taken + 1)

    def after(self, beat: Heartbeat, now: float) -> "Worker":
        """This worker after a heartbeat."""
        moved = beat.progress != self.progress
        return replace(
            self.heard(now),
            load=beat.load,
            progress=beat.progress,
            progress_at=now if moved else self.progress_at,
            is_stalled=self.is_stalled and not moved,
            is_draining=beat.draining,
        )

    def forgiven(self, pause_s: float, now: float) -> "Worker":
        """This worker, without holding against it a time in which the gateway itself stood still."""
        return replace(
            self,
            heard_at=min(now, self.heard_at + pause_s),
            progress_at=min(now, self.progress_at + pause_s),
        )

    def has_stalled(self, stalled_after_s: float, now: float) -> bool:
        """Whether its engine has stood still for so long; an idle one wakes up several times a second."""
        return now - self.progress_at >= stalled_after_s
