"""What it saves that equal KV is computed and sent once: prompts that begin alike, and several choices of one prompt.

    python -m experiments.bench_sharing                        # starts a server of its own
    python -m experiments.bench_sharing --url http://...       # measures one that runs, kvsplice

Two parts, each for prompts that go over a prefill worker and for those that decode computes itself:

1. TTFT of fresh prompts, and of prompts whose first tokens an earlier one has left in the cache, in turn. Each prefix
   is new: the pair's second prompt meets nothing but what its own first call left.
2. Fresh prompts with one choice and with several, in turn: time until all choices have their second token, which is
   behind prefill and transfer, and KV bytes that went over the wire.

Exit code 0 if all is as demanded, 1 if not.
"""

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Final

import httpx

from experiments.fresh_prompts import NUM_WORDS, IdPrompts, prompt_source
from experiments.handoff_summary import series_total
from experiments.own_server import own_server
from experiments.server_flags import add_caller_flags, require_positive
from experiments.sharing_client import Shared, SharingClient
from experiments.sharing_summary import (
    ChoicePairs,
    PrefixPairs,
    SharingResult,
    choices_table,
    prefix_table,
    verdicts,
)
from experiments.stream_client import ServerError, StreamClient, first_model, open_client

MODES: Final = ("disaggregated", "local")
WARM_UP_PAIRS: Final = 1
BEAT_SECONDS: Final = 1.5
"""Workers' own counts reach /metrics with their beats."""
_SENT_BYTES: Final = "kvsplice:kv_transfer_bytes_total"


class Bench:
    """One server, and prompts that it has not seen."""

    def __init__(self, http: httpx.AsyncClient, model: str, prompts: IdPrompts, options: argparse.Namespace) -> None:
        self._http = http
        self._model = model
        self._prompts = prompts
        self._options = options

    async def prefixes(self, mode: str) -> PrefixPairs:
        client = SharingClient(self._http, self._model, mode)
        pairs = [await self._prefix_pair(client) for _ in range(WARM_UP_PAIRS + self._options.rounds)][WARM_UP_PAIRS:]
        fresh = tuple(first.ttft for first, _ in pairs)
        return PrefixPairs(
            mode, fresh, tuple(second.ttft for _, second in pairs), min(second.cached for _, second in pairs)
        )

    async def _prefix_pair(self, client: SharingClient) -> tuple[Shared, Shared]:
        options = self._options
        fresh = await client.ask(self._prompts.take(options.prompt_tokens))
        prefix = self._prompts.take(options.prefix_tokens)
        await client.ask(prefix)
        rest = self._prompts.take(options.prompt_tokens - options.prefix_tokens)
        return fresh, await client.ask([*prefix, *rest])

    async def choices(self, mode: str) -> ChoicePairs:
        client = SharingClient(self._http, self._model, mode)
        one: list[float] = []
        many: list[float] = []
        bytes_of = {1: 0.0, self._options.choices: 0.0}
        for number in range(WARM_UP_PAIRS + self._options.rounds):
            for count, times in ((1, one), (self._options.choices, many)):
                before = await self._sent_bytes()
                answer = await client.ask(self._prompts.take(self._options.prompt_tokens), count)
                if number >= WARM_UP_PAIRS:
                    times.append(answer.all_second)
                    bytes_of[count] += await self._sent_bytes() - before
        sends = mode != "local"
        one_bytes, many_bytes = (bytes_of[count] / self._options.rounds if sends else None for count in bytes_of)
        return ChoicePairs(mode, self._options.choices, tuple(one), tuple(many), one_bytes, many_bytes)

    async def _sent_bytes(self) -> float:
        """What prefill workers have sent since their start, as soon as /metrics know of all that has happened."""
        await asyncio.sleep(BEAT_SECONDS)
        response = await self._http.get("/metrics")
        return series_total(response.text, _SENT_BYTES, 'role="prefill"') or 0.0


async def measure(url: str, options: argparse.Namespace) -> SharingResult:
    """Raises ServerError, httpx.HTTPError or TimeoutError if the server cannot be measured."""
    async with open_client(url, options.api_key) as http:
        model = options.model or await first_model(http)
        source = await prompt_source(StreamClient(http, model, ignore_eos=True), random.Random(), NUM_WORDS)
        if not isinstance(source, IdPrompts):
            raise ServerError("the server has no /tokenize: this is no kvsplice")
        bench = Bench(http, model, source, options)
        prefixes = tuple([await bench.prefixes(mode) for mode in MODES])
        if options.choices == 1:
            return SharingResult(prefixes, ())
        try:
            return SharingResult(prefixes, tuple([await bench.choices(mode) for mode in MODES]))
        except ServerError as error:
            return SharingResult(prefixes, (), str(error))


def report(result: SharingResult, options: argparse.Namespace) -> str:
    """Tables, and what is demanded."""
    cached = ", ".join(f"{pairs.cached} ({pairs.mode})" for pairs in result.prefixes)
    parts = [
        f"Prompts of {options.prompt_tokens} tokens, {options.rounds} of each kind in turn; of the others the first "
        f"{options.prefix_tokens} tokens had come before, of which the cache had {cached}. "
        f"Load of the machine at the end: {os.getloadavg()[0]:.1f}.\n",
        prefix_table(result.prefixes),
    ]
    if result.choices:
        parts.append(choices_table(result.choices))
    parts.append("".join(f"{line}\n" for _, line in verdicts(result)))
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    require_positive(parser, options, ("rounds", "prompt_tokens", "prefix_tokens", "choices"))
    if options.prefix_tokens >= options.prompt_tokens:
        parser.error("--prefix-tokens must be less than --prompt-tokens")
    try:
        server = own_server(options.serve_flags.split()) if options.url is None else nullcontext(options.url)
        with server as url:
            result = asyncio.run(measure(url, options))
    except (ServerError, httpx.HTTPError, TimeoutError) as error:
        sys.stderr.write(f"the server cannot be measured: {type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(report(result, options))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return 0 if all(is_met for is_met, _ in verdicts(result)) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.bench_sharing", description=__doc__.split("\n\n")[0])
    parser.add_argument("--url", help="of a running kvsplice; one is started if not given")
    parser.add_argument("--serve-flags", default="", help="for the server that is started, in one argument")
    add_caller_flags(parser)
    parser.add_argument("--rounds", type=int, default=8, help="that count, of each kind")
    parser.add_argument("--prompt-tokens", type=int, default=1600)
    parser.add_argument("--prefix-tokens", type=int, default=1500, help="of them in the cache")
    parser.add_argument("--choices", type=int, default=8, help="of the calls for several; 1 leaves that part out")
    parser.add_argument("--json", type=Path, help="also write the figures of each call to this file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
