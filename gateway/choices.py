"""Runs the choices of one call at the same time and hands out their text in the order in which it comes.

    backend.generate --> ChoiceText --+
    backend.generate --> ChoiceText --+--> buffer, at most N tokens --> next()
    backend.generate --> ChoiceText --+

Choices of one prompt begin together: it is computed once for all of them.

One failure fails the call: the first error comes out of `next`, and leaving the context closes all generators, which
cancels what still runs. A consumer that lets more than N tokens wait gets SlowReaderError, and what waited is dropped.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from gateway.backend import Backend, BackendError, RequestFailedError, Traits
from gateway.choice_text import ChoiceRules, ChoiceText, TextDelta
from gateway.echo import Echo
from gateway.errors import ApiError, InternalError, SlowReaderError
from gateway.gathering import Gathering
from gateway.metrics import Metrics, RequestTimer
from gateway.modes import Mode
from gateway.tokenizer import Tokenizer
from kvtransfer.request_parts import SamplingParams

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """One prompt and how to go on from it. Choices of one prompt follow each other and differ in their
    `sampling.choice_index`, which counts from 0. `echo`: what of the prompt comes before the output."""

    index: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    traits: Traits
    echo: Echo | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, which counts with its first choice."""
        return len(self.prompt_token_ids) if self.is_first else 0

    @property
    def is_first(self) -> bool:
        return self.sampling.choice_index == 0


class ChoiceStreams:
    """The choices of one call, as an async context manager around the time in which they run.

    `mode`, where the prompt of the first one is computed, is known with the first token.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        rules: ChoiceRules,
        max_buffered: int,
    ) -> None:
        self.mode: Mode | None = None
        self._backend = backend
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._rules = rules
        self._max_buffered = max_buffered
        self.num_cached = 0  # prompt tokens so far that were found in a prefix cache
        self._batches: deque[list[TextDelta]] = deque()
        self._num_buffered = 0
        self._num_running = 0
        self._error: ApiError | BackendError | None = None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, choices: Sequence[Choice], started_at: float) -> Self:
        """Starts all choices; `started_at` is when the call arrived, on the metrics' clock."""
        self._num_running = len(choices)
        for together in _by_prompt(choices):
            gathering: Gathering[Any] = Gathering(len(together))
            for choice in together:
                timer = RequestTimer(self._metrics, started_at, choice.num_prompt_tokens)
                self._tasks.append(asyncio.create_task(self._run(choice, timer, gathering)))
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self) -> list[TextDelta] | None:
        """The next deltas of one choice, never empty; None when all choices are finished. Raises the error of a choice
        once what came before it is out."""
        while not self._batches:
            if self._error is not None:
                raise self._error
            if self._num_running == 0:
                return None
            self._changed.clear()
            await self._changed.wait()
        batch = self._batches.popleft()
        self._num_buffered -= len(batch)
        return batch

    async def _run(self, choice: Choice, timer: RequestTimer, gathering: Gathering[Any]) -> None:
        """One choice to its end; the boundary for whatever goes wrong in it."""
        try:
            timer.end(await self._produce(choice, timer, gathering))
        except asyncio.CancelledError:
            timer.end("abort")
            raise
        except (ApiError, BackendError) as error:
            timer.end("error")
            self._fail(error)
        except Exception:  # noqa: BLE001  # the boundary; logged with its traceback
            _LOG.exception("a choice failed")
            timer.end("error")
            self._fail(InternalError())
        self._num_running -= 1
        self._changed.set()

    def _fail(self, error: ApiError | BackendError) -> None:
        """The others stop at once: the consumer may be stuck in a write and see the error late."""
        self._error = self._error or error
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def _produce(self, choice: Choice, timer: RequestTimer, gathering: Gathering[Any]) -> str:
        text = ChoiceText(choice.index, choice.prompt_token_ids, self._tokenizer, self._rules, choice.echo)
        tokens = self._backend.generate(
            choice.prompt_token_ids,
            choice.sampling,
            choice.traits,
            arrived_at=timer.started_at,
            note_mode=self._note_mode,
            gathering=gathering,
        )
        async with aclosing(tokens):
            async for delta in tokens:
                self.num_cached += delta.num_cached if choice.is_first else 0
                batch = text.push(delta)
                timer.on_tokens(sum(piece.num_tokens for piece in batch))
                self._put(batch)
                if batch and batch[-1].finish_reason is not None:
                    return batch[-1].finish_reason
                await asyncio.sleep(0)  # a backend with much to say must not starve the consumer
        raise RequestFailedError("the workers ended the request without a reason")

    def _note_mode(self, mode: Mode) -> None:
        self.mode = self.mode or mode  # choices start in their order

    def _put(self, batch: list[TextDelta]) -> None:
        if not batch:
            return
        if self._num_buffered >= self._max_buffered:
            self._batches.clear()
            self._num_buffered = 0
            raise SlowReaderError("the answer was not read fast enough")
        self._batches.append(batch)
        self._num_buffered += len(batch)
        self._changed.set()


def _by_prompt(choices: Sequence[Choice]) -> list[list[Choice]]:
    """The choices of each prompt."""
    groups: list[list[Choice]] = []
    for choice in choices:
        if choice.is_first:
            groups.append([])
        groups[-1].append(choice)
    return groups
