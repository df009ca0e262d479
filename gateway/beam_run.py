"""A beam search on the workers.

    step 1     prompt                   wherever the call's mode says, two tokens: with the second one decode has the KV
    step 2     prompt + A               on decode alone: one request a beam, all at once
               prompt + B
    step 3     prompt + AB ...

Each request asks for what may follow its tokens, and ends with that. Beams share the KV of all full blocks through
decode's prefix cache, so that a step computes the tokens behind the last full block of each beam, one at least.

The first request that fails fails the search, and cancels the others; a lost worker is the backend's to replace. If a
later step finds no worker to begin on, it waits for one, as a request does that has lost its own. One time limit holds
for all of a search.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, TypeVar

from gateway.backend import Backend, DeadlineExceededError, RequestFailedError, Traits, UnavailableError
from gateway.beam_search import Beam, BeamRules, BeamSearch
from gateway.choices import Choice
from gateway.metrics import RequestTimer
from gateway.modes import Mode
from kvtransfer.request_parts import SamplingParams, TokenLogprob

_T = TypeVar("_T")

ASK_AGAIN_S: Final = 0.25


class BeamRun:
    """The search for one prompt. `mode`, where that was computed, and `num_cached`, how much of it was found in a
    prefix cache, are known with the first step."""

    def __init__(
        self, backend: Backend, choice: Choice, rules: BeamRules, timer: RequestTimer, patience_s: float
    ) -> None:
        """`patience_s`: how long a step waits for a worker to begin on."""
        self.mode: Mode | None = None
        self.num_cached = 0
        self._backend = backend
        self._choice = choice
        self._rules = rules
        self._timer = timer
        self._patience_s = patience_s

    async def run(self, timeout_s: float) -> list[Beam]:
        """The best beams. Raises BackendError."""
        try:
            beams = await self._search(timeout_s)
        except asyncio.CancelledError:
            self._timer.end("abort")
            raise
        except Exception:
            self._timer.end("error")
            raise
        self._timer.end("stop" if beams[0].is_stopped else "length")
        return beams

    async def _search(self, timeout_s: float) -> list[Beam]:
        search = BeamSearch(self._rules, self._choice.sampling.max_tokens)
        try:
            async with asyncio.timeout(timeout_s):
                while not search.is_over:
                    search.advance(await self._step(search))
                    self._timer.on_tokens(1)
        except TimeoutError:
            raise DeadlineExceededError("the request took longer than this server allows") from None
        return search.best()

    async def _step(self, search: BeamSearch) -> list[TokenLogprob]:
        """What may follow each live beam."""
        traits = self._choice.traits
        if search.num_steps == 0:
            num_tokens = min(2, self._choice.sampling.max_tokens)
            return [await self._ask((), num_tokens, traits, self._note_mode)]
        on_decode = replace(traits, mode=Mode.LOCAL, is_step=True)
        return await all_of(self._ask_patiently(beam.token_ids, on_decode) for beam in search.live)

    async def _ask_patiently(self, output: tuple[int, ...], traits: Traits) -> TokenLogprob:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._patience_s
        while True:
            try:
                return await self._ask(output, 1, traits)
            except UnavailableError:  # nobody has done anything for it yet
                if loop.time() >= give_up_at:
                    raise
            await asyncio.sleep(ASK_AGAIN_S)

    async def _ask(
        self,
        output: tuple[int, ...],
        num_tokens: int,
        traits: Traits,
        note_mode: Callable[[Mode], None] | None = None,
    ) -> TokenLogprob:
        """What may follow the prompt and `output`. Reads to the end: to leave early would cancel the KV's way."""
        told: TokenLogprob | None = None
        tokens = self._backend.generate(
            self._choice.prompt_token_ids + output,
            self._asking(num_tokens),
            traits,
            arrived_at=self._timer.started_at,
            note_mode=note_mode,
        )
        async with aclosing(tokens):
            async for delta in tokens:
                if told is None and delta.logprobs:
                    told = delta.logprobs[0]
                self.num_cached += 0 if output else delta.num_cached
        if told is None or len(told.top) < self._rules.num_candidates:
            raise RequestFailedError("the workers did not say which tokens are likely")
        return told

    def _asking(self, num_tokens: int) -> SamplingParams:
        """Which token is drawn does not matter, and none ends the request."""
        asked = self._choice.sampling.num_logprobs or 0
        return SamplingParams(
            max_tokens=num_tokens,
            seed=0,
            temperature=0.0,
            ignore_eos=True,
            num_logprobs=max(asked, self._rules.num_candidates),
        )

    def _note_mode(self, mode: Mode) -> None:
        self.mode = mode


async def all_of(works: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """What all of them give. The first error is raised, and whatever then still runs has been cancelled and is over."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
