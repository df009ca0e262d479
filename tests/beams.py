"""A plain beam search, to compare with: all of the vocabulary each time, no early end, nothing shared."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field


@dataclass
class PlainBeams:
    """`outputs`: token ids of the best beams, the best one first, and `scores`. `margin`: the least lead with which a
    choice between two of them was made; one beyond the error of sums in another order makes an equality a proof."""

    outputs: list[tuple[int, ...]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    margin: float = math.inf


def plain_beams(
    logprobs_after: Callable[[tuple[int, ...]], Sequence[float]],
    *,
    width: int,
    num_best: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    stop_ids: Collection[int] = (),
) -> PlainBeams:
    """`logprobs_after(output)`: of each token of the vocabulary, behind the prompt and `output`."""
    found = PlainBeams()
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(max_tokens):
        going = []
        for total, output in live:
            row = logprobs_after(output)
            for token in _likeliest(row, 2 * width, stop_ids, found):
                beam = (total + row[token], (*output, token))
                if token in stop_ids:
                    done.append((beam[0] / len(beam[1]) ** length_penalty, beam[1]))
                else:
                    going.append(beam)
        going.sort(key=lambda beam: -beam[0])
        if len(going) > width:
            found.margin = min(found.margin, going[width - 1][0] - going[width][0])
        live = going[:width]
    done += [(total / len(output) ** length_penalty, output) for total, output in live]
    done.sort(key=lambda beam: -beam[0])
    for place in range(num_best):
        if place + 1 < len(done):
            found.margin = min(found.margin, done[place][0] - done[place + 1][0])
        found.scores.append(done[place][0])
        found.outputs.append(done[place][1])
    return found


def _likeliest(row: Sequence[float], count: int, stop_ids: Collection[int], found: PlainBeams) -> list[int]:
    """The candidates behind a beam: `count` tokens."""
    order = sorted(range(len(row)), key=lambda token: -row[token])
    # Of those that don't end a beam, the last candidates are too unlikely to be among the best.
    if {order[count - 1], order[count]} & set(stop_ids):
        found.margin = min(found.margin, row[order[count - 1]] - row[order[count]])
    return order[:count]
