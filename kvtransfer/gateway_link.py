"""One gateway as a worker sees it: a state machine without socket, thread or clock. `now` is seconds, monotonic.

                                 Welcome
                GREETING  ---------------------->  WELCOMED  --> GREETING   lost: a message is missing, another epoch,
                   |                                ^   |                   silence, Reintroduce
                   | Refused                Welcome |   | Refused
                   +------------> REFUSED ----------+   +------> REFUSED

Each move out of WELCOMED begins another introduction, so that whatever still comes of the time before is told apart.
"""

from dataclasses import dataclass
from enum import Enum

from kvtransfer.messages import (
    Cancel,
    DecodeRequest,
    GatewayBeat,
    GatewayToWorker,
    PrefillRequest,
    Refused,
    Reintroduce,
    RequestMessage,
    ResetPrefixCache,
    SwitchRole,
    Welcome,
)

HELLO_INTERVAL_S = 0.25
REFUSED_INTERVAL_S = 5.0
"""Between Hellos to a gateway that has refused us: it may take us in once other workers have changed."""


class LinkState(Enum):
    """How far a worker is with a gateway."""

    GREETING = "greeting"  # Hello is said until it is answered
    WELCOMED = "welcomed"  # beats, requests and outputs flow
    REFUSED = "refused"  # turned down; asked again at long intervals


@dataclass
class GatewayLink:
    """Where we are with one gateway, and the numbers of what was sent and taken since its Welcome. `has_given`: the
    engine was handed something of this gateway, and not told of a loss since."""

    endpoint: str
    state: LinkState = LinkState.GREETING
    introduction: int = 1
    epoch: str = ""
    refusal: str = ""
    num_sent: int = 0
    num_taken: int = 0
    has_given: bool = False
    heard_at: float = 0.0
    next_send: float = 0.0  # of a Hello or a Heartbeat

    @property
    def is_welcomed(self) -> bool:
        return self.state is LinkState.WELCOMED

    def loss_by(self, message: GatewayToWorker) -> str | None:
        """Why this message ends the link, if it does: the gateway has lost track of us, or messages were lost."""
        if not self.is_welcomed:
            return None  # what comes now is of a time that is over, or a Welcome
        match message:
            case Reintroduce():
                return "does not know us"
            case Welcome(epoch) | GatewayBeat(epoch) if epoch != self.epoch:
                return "was restarted"
            case GatewayBeat(sequence=sequence) if sequence != self.num_taken:
                return f"had sent {sequence} messages, {self.num_taken} came"
            case PrefillRequest() | DecodeRequest() | Cancel() | ResetPrefixCache() | SwitchRole() if (
                message.sequence != self.num_taken + 1
            ):
                return f"sent message {message.sequence} behind message {self.num_taken}"
            case Refused():
                return "refuses us from now on"
        return None

    def welcome(self, message: Welcome, now: float) -> bool:
        """True if this is the Welcome that was waited for; a repeated one, or a late one, changes nothing."""
        if self.is_welcomed or message.introduction != self.introduction:
            return False
        self.state, self.epoch, self.refusal = LinkState.WELCOMED, message.epoch, ""
        self.num_sent = self.num_taken = 0
        self.next_send = now
        return True

    def refuse(self, reason: str, now: float) -> bool:
        """Takes a refusal of a link that isn't up; True if it is the first, or says something else."""
        assert not self.is_welcomed, self.endpoint
        is_news = self.state is not LinkState.REFUSED or self.refusal != reason
        self.state, self.refusal = LinkState.REFUSED, reason
        self.next_send = now + REFUSED_INTERVAL_S
        return is_news

    def lose(self) -> None:
        """From here on nothing of this introduction counts; the next Hello is due at once."""
        assert self.is_welcomed, self.endpoint
        self.state = LinkState.GREETING
        self.introduction += 1
        self.next_send = 0.0

    def takes(self, message: RequestMessage) -> bool:
        """Whether a request or a cancellation counts; one that comes while we aren't welcomed does not."""
        if not self.is_welcomed:
            return False
        assert message.sequence == self.num_taken + 1, (message.sequence, self.num_taken)
        self.num_taken += 1
        return True

    def hello_said(self, now: float) -> None:
        interval = REFUSED_INTERVAL_S if self.state is LinkState.REFUSED else HELLO_INTERVAL_S
        self.next_send = now + interval
