"""What the outside world knows of a scheduler's requests: enough to notice a gap, a repeat or a second end."""

from collections.abc import Sequence

from kvtransfer.request_parts import EndReason


class Ledger:
    """Every output of every request, and the end that each must have exactly once."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, EndReason] = {}

    def born(self, request_id: str, resumed: Sequence[int] = ()) -> None:
        """`resumed`: output tokens that the outside world had from an earlier attempt."""
        assert request_id not in self.tokens
        self.tokens[request_id] = list(resumed)

    def take(self, outgoing) -> None:
        for item in outgoing:
            output = item.output
            known = self.tokens[output.request_id]
            assert output.request_id not in self.ends, f"{output.request_id} spoke after its end"
            assert output.start <= len(known), f"a gap in {output.request_id}"
            assert (
                tuple(known[output.start : output.start + len(output.token_ids)])
                == output.token_ids[: len(known) - output.start]
            ), "contradiction"
            known[output.start :] = output.token_ids
            if output.end is not None:
                self.ends[output.request_id] = output.end.reason

    @property
    def alive(self) -> list[str]:
        return [request_id for request_id in self.tokens if request_id not in self.ends]

    def check_all_have_ended(self) -> None:
        assert self.alive == []
