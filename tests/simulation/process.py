"""What all simulated processes have in common: they live, stop for a while, are slow, and die."""

from tests.simulation.timeline import Timeline

LAG_S = (0.0001, 0.002)  # from a wake-up to the turn it is for


class Process:
    """`host` is its place in the network, `life` counts its starts."""

    def __init__(self, timeline: Timeline, host: str, life: int) -> None:
        self.timeline = timeline
        self.host = host
        self.life = life
        self.is_alive = True
        self.slowness = 1.0
        self.paused_until = 0.0
        self.rng = timeline.rng(f"{host}/{life}")

    @property
    def title(self) -> str:
        return f"{self.host}#{self.life}"

    def ready_at(self) -> float | None:
        """When its threads may run next; None once it is dead."""
        return max(self.timeline.now, self.paused_until) if self.is_alive else None

    def lag(self) -> float:
        return self.rng.uniform(*LAG_S) * self.slowness

    def note(self, what: str) -> None:
        self.timeline.note(self.title, what)

    def die(self) -> None:
        """At once and with all it knew, as by SIGKILL."""
        self.is_alive = False
