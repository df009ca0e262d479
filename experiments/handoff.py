"""What the hand-over from prefill to decode adds to a request that is alone on the system.

    kvsplice serve                                              # in one terminal
    python -m experiments.handoff --url http://127.0.0.1:8000 [--requests 12] [--json FILE]

Fresh long prompts go out one after another; each stream's TTFT, time to the second token, gap between these two, and
the median of its other gaps are taken at the client. With kvsplice as server, /metrics say how long the transfer kept
decode waiting when all KV was computed; any other OpenAI-compatible server is measured without that.

A few requests of the same shape come first and are not counted.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import httpx

from experiments.fresh_prompts import PromptSource, prompt_source
from experiments.handoff_summary import (
    EXPOSED_METRIC,
    HandoffResult,
    HistogramTotal,
    handoff_table,
    histogram_total,
    summarise,
    verdict_lines,
)
from experiments.server_flags import add_server_flags, require_positive
from experiments.stream_client import ServerError, StreamClient, first_model, open_client
from experiments.stream_record import StreamRecord

WARM_UP_REQUESTS: Final = 2
REQUEST_SECONDS: Final = 300.0
"""A request that takes longer is cut, and does not count."""
SAMPLE_WORDS: Final = 64
_METRICS_SECONDS: Final = 10.0


async def measure(options: argparse.Namespace) -> HandoffResult:
    """Raises ServerError or httpx.HTTPError if the server cannot be measured at all."""
    async with open_client(options.url, options.api_key) as http:
        model = options.model or await first_model(http)
        client = StreamClient(http, model, ignore_eos=not options.plain)
        prompts = await prompt_source(client, random.Random(), SAMPLE_WORDS)
        await _one_by_one(client, prompts, options, WARM_UP_REQUESTS)
        before = await _exposed(http)
        records = await _one_by_one(client, prompts, options, options.requests)
        return summarise(records, before, await _exposed(http))


async def _one_by_one(
    client: StreamClient, prompts: PromptSource, options: argparse.Namespace, count: int
) -> list[StreamRecord]:
    return [
        await client.stream(prompts.take(options.prompt_tokens), options.output, time.monotonic() + REQUEST_SECONDS)
        for _ in range(count)
    ]


async def _exposed(http: httpx.AsyncClient) -> HistogramTotal | None:
    """None if this server does not tell."""
    response = await http.get("/metrics", timeout=_METRICS_SECONDS)
    return histogram_total(response.text, EXPOSED_METRIC) if response.status_code == httpx.codes.OK else None


def report(result: HandoffResult, options: argparse.Namespace) -> str:
    about = (
        f"{len(result.handoffs)} fresh prompts of {options.prompt_tokens} tokens, {options.output} out, one after "
        f"another. Load of the client's machine at the end: {os.getloadavg()[0]:.1f}.\n"
    )
    return "\n".join([about, handoff_table(result), *verdict_lines(result)]).rstrip("\n") + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    require_positive(parser, options, ("requests", "prompt_tokens", "output"))
    try:
        result = asyncio.run(measure(options))
    except (ServerError, httpx.HTTPError) as error:
        sys.stderr.write(f"{options.url} cannot be measured: {type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(report(result, options))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return 1 if result.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.handoff", description=__doc__.split("\n\n")[0])
    add_server_flags(parser)
    parser.add_argument("--requests", type=int, default=12, help="that count")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--json", type=Path, help="also write the figures of each stream to this file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
