"""What following a JSON schema adds to the time between tokens.

    kvsplice serve                                                     # in one terminal
    python -m experiments.structured_itl --url http://127.0.0.1:8000 [--rounds 5]

Streams without and with a schema take turns, at each number of streams at once; the schema asks for more than fits, so
that both have the same number of tokens. Printed are the medians of all gaps between chunks at the client. The first
round is not counted.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

import httpx

from experiments.server_flags import add_server_flags, require_positive
from experiments.stream_client import ServerError, StreamClient, first_model, open_client
from experiments.stream_record import Outcome

STREAMS_AT_ONCE: Final = (1, 8)
REQUEST_SECONDS: Final = 300.0
PROMPT: Final = "A list of people as JSON: "
SCHEMA: Final[dict[str, Any]] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer"},
            "alive": {"type": "boolean"},
        },
        "required": ["name", "age", "alive"],
        "additionalProperties": False,
    },
}


async def measure(options: argparse.Namespace) -> list[tuple[int, float, float]]:
    """(streams at once, median gap in ms without a schema, with it). Raises ServerError, httpx.HTTPError."""
    async with open_client(options.url, options.api_key) as http:
        model = options.model or await first_model(http)
        plain = StreamClient(http, model, ignore_eos=True)
        formed = StreamClient(http, model, ignore_eos=False, fields={"guided_json": SCHEMA})
        found = []
        for count in STREAMS_AT_ONCE:
            gaps: tuple[list[float], list[float]] = ([], [])
            for number in range(options.rounds + 1):
                for client, into in zip((plain, formed), gaps, strict=True):
                    new = await _gaps(client, count, options.output)
                    into.extend(new if number else ())
            found.append((count, 1e3 * median(gaps[0]), 1e3 * median(gaps[1])))
        return found


async def _gaps(client: StreamClient, count: int, max_tokens: int) -> list[float]:
    """Of `count` streams at once, in seconds."""
    stop_at = time.monotonic() + REQUEST_SECONDS
    records = await asyncio.gather(*(client.stream(PROMPT, max_tokens, stop_at) for _ in range(count)))
    for record in records:
        if record.outcome is not Outcome.FINISHED:
            raise ServerError(record.failure or "a stream took too long")
    return [gap for record in records for _, gap in record.gaps(0.0, stop_at)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.structured_itl", description=__doc__.split("\n\n")[0])
    add_server_flags(parser)
    parser.add_argument("--rounds", type=int, default=5, help="that count")
    parser.add_argument("--output", type=int, default=96, help="tokens of each answer")
    options = parser.parse_args(arguments)
    require_positive(parser, options, ("rounds", "output"))
    try:
        found = asyncio.run(measure(options))
    except (ServerError, httpx.HTTPError) as error:
        sys.stderr.write(f"{options.url} cannot be measured: {type(error).__name__}: {error}\n")
        return 1
    for count, without, with_schema in found:
        sys.stdout.write(
            f"{count} at once: ITL {without:.2f} ms without a schema, {with_schema:.2f} ms with one, "
            f"ratio {with_schema / without:.3f}\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
