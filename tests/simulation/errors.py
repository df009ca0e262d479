"""What a simulation finds.

ViolationError       the system did something that it must never do
"""


class ViolationError(AssertionError):
    """An invariant is broken; the text says which, and whose."""


def require(holds: object, *what: object) -> None:
    """Raises ViolationError with `what` unless `holds`. Texts are made only then: this is called for every event."""
    if not holds:
        raise ViolationError(" ".join(str(part) for part in what))
