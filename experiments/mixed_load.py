"""What long prompts do to running streams, and running streams to long prompts, on any OpenAI-compatible server.

    kvsplice serve                                              # in one terminal, or any other server
    python -m experiments.mixed_load --url http://127.0.0.1:8000 [--seconds 60] [--json FILE]

1. Warm-up with both kinds of load at once. Not counted.
2. Streams alone.
3. Streams, and a long prompt every few seconds.

Before, between and behind these two, some long prompts on an idle system, one after another and as far apart as under
load: in three turns, because machines drift.

A token's time is the arrival of its chunk, TTFT that of the first chunk with content, counted from the call; n chunks
have n - 1 gaps (ITL). All prompts are random words that no prompt before them had in that order.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import httpx

from experiments.fresh_prompts import prompt_source
from experiments.mixed_summary import summarise_idle, summarise_long, summarise_streams
from experiments.mixed_tables import MixedResult, failure_lines, long_table, stream_table
from experiments.mixed_traffic import Shape, Traffic
from experiments.server_flags import add_server_flags, require_positive
from experiments.stream_client import ServerError, StreamClient, first_model, open_client


async def measure(options: argparse.Namespace, shape: Shape) -> MixedResult:
    """Raises ServerError or httpx.HTTPError if the server cannot be measured at all."""
    async with open_client(options.url, options.api_key) as http:
        model = options.model or await first_model(http)
        client = StreamClient(http, model, ignore_eos=not options.plain)
        prompts = await prompt_source(client, random.Random(), sample_words=shape.stream_tokens)
        _say(f"model {model}, prompts {'of exact length' if prompts.is_exact else 'as text, of about the length'}")
        return await _run(Traffic(client, prompts, shape), options)


async def _run(traffic: Traffic, options: argparse.Namespace) -> MixedResult:
    _say(f"warming up for {options.warmup:g} s, not counted")
    await traffic.phase(options.warmup, with_long_prompts=True)
    _say(f"streams alone for {options.seconds:g} s, then with long prompts for as long")
    idle = list(await traffic.idle(options.idle_prompts))
    alone = await traffic.phase(options.seconds, with_long_prompts=False)
    idle += await traffic.idle(options.idle_prompts)
    mixed = await traffic.phase(options.seconds, with_long_prompts=True)
    idle += await traffic.idle(options.idle_prompts)
    return MixedResult(
        alone=summarise_streams(alone),
        mixed=summarise_streams(mixed),
        idle=summarise_idle(idle),
        loaded=summarise_long(mixed.long_prompts, mixed.start, mixed.stop, 1 / options.long_every),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    require_positive(
        parser,
        options,
        ("streams", "stream_tokens", "stream_output", "long_tokens", "idle_prompts", "seconds", "long_every"),
    )
    shape = Shape(
        streams=options.streams,
        stream_tokens=options.stream_tokens,
        stream_output=options.stream_output,
        long_tokens=options.long_tokens,
        long_every=options.long_every,
        settle=options.settle,
    )
    try:
        result = asyncio.run(measure(options, shape))
    except (ServerError, httpx.HTTPError) as error:
        _say(f"{options.url} cannot be measured: {type(error).__name__}: {error}")
        return 1
    sys.stdout.write(report(result, options, shape))
    if options.json is not None:
        record = {"shape": asdict(shape), "seconds": options.seconds, "warmup": options.warmup, **asdict(result)}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failure_lines(result) else 0


def report(result: MixedResult, options: argparse.Namespace, shape: Shape) -> str:
    about = (
        f"{shape.streams} streams (closed loop) of {shape.stream_tokens} tokens in, {shape.stream_output} out, back to "
        f"back for {options.seconds:g} s; a long prompt (open loop) of {shape.long_tokens} tokens in, "
        f"{shape.long_output} out, every {shape.long_every:g} s. Not counted: {options.warmup:g} s of both at the "
        f"start, and {shape.settle:g} s of each phase.\n"
    )
    return "\n".join([about, stream_table(result), long_table(result), *failure_lines(result)]).rstrip("\n") + "\n"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _parser() -> argparse.ArgumentParser:
    shape = Shape()
    parser = argparse.ArgumentParser(prog="python -m experiments.mixed_load", description=__doc__.split("\n\n")[0])
    add_server_flags(parser)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two phases that are compared")
    parser.add_argument("--warmup", type=float, default=10.0, help="seconds")
    parser.add_argument("--settle", type=float, default=shape.settle, help="seconds of each phase before it counts")
    parser.add_argument("--streams", type=int, default=shape.streams)
    parser.add_argument("--stream-tokens", type=int, default=shape.stream_tokens, help="of a stream's prompt")
    parser.add_argument("--stream-output", type=int, default=shape.stream_output, help="tokens of a stream")
    parser.add_argument("--long-tokens", type=int, default=shape.long_tokens)
    parser.add_argument("--long-every", type=float, default=shape.long_every, help="seconds")
    parser.add_argument("--idle-prompts", type=int, default=4, help="at each of the three times")
    parser.add_argument("--json", type=Path, help="also write the results to this file, with ECDFs")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
