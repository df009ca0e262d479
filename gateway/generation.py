"""The life of one generating call, from its checked request to the last byte of its answer.

1. `Generation.answer` starts one backend request for each choice of each prompt, all at once (`gateway.choices`).
2. Not streamed: texts are gathered, then sent as one JSON answer.
   Streamed: the first token decides. What fails before it is an ordinary HTTP error; from then on the answer is a
   200 with events, and a failure is one error event in place of `[DONE]`.
   Beams: a search for each prompt instead, of many requests one after the other (`gateway.beam_run`), not streamed.
3. The client leaves: the work is cancelled, and with it all backend requests. Deadlines are the backend's.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from gateway.answers import AnswerShape, Envelope, Usage
from gateway.asgi import Receive, Send, send_json
from gateway.backend import Backend, BackendError, TokenDelta
from gateway.beam_run import BeamRun, all_of
from gateway.beam_search import Beam, BeamRules
from gateway.choice_text import ChoiceRules, ChoiceText, TextDelta
from gateway.choices import Choice, ChoiceStreams
from gateway.errors import ApiError, InternalError, error_body
from gateway.limits import HttpSettings
from gateway.metrics import Metrics, RequestTimer
from gateway.mode_header import mode_headers
from gateway.ranking import best_of, numbered
from gateway.schemas import StreamOptions
from gateway.sse import EventStream
from gateway.text_pool import TextPool
from gateway.tokenizer import Tokenizer
from kvtransfer.request_parts import EndReason

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

FEW_TOKENS: Final = 256
"""Whose log probabilities are put into an answer on the event loop: a few milliseconds, with 20 alternatives each."""


@dataclass(frozen=True)
class Call:
    """A checked call. `stream` is None for an answer in one piece; `started_at` is on the metrics' clock. `num_kept`:
    the best choices of each prompt are the answer, None: all are. `beams`: how to search; one of `choices` is where the
    search for its prompt begins."""

    shape: AnswerShape
    model: str
    choices: tuple[Choice, ...]
    rules: ChoiceRules
    stream: StreamOptions | None
    started_at: float
    num_kept: int | None = None
    beams: BeamRules | None = None


class Generation:
    """Answers calls. Its parts outlive it."""

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, settings: HttpSettings, metrics: Metrics, pool: TextPool
    ) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._settings = settings
        self._metrics = metrics
        self._pool = pool

    async def answer(self, call: Call, receive: Receive, send: Send) -> None:
        """Sends the whole answer. Raises ApiError and BackendError as long as nothing has been sent."""
        if call.beams is not None:
            work = self._searched(call, call.beams, send)
        elif call.stream is None:
            work = self._whole(call, send)
        else:
            work = self._streamed(call, call.stream, send)
        await run_until_gone(work, receive)

    async def _searched(self, call: Call, rules: BeamRules, send: Send) -> None:
        timers = [RequestTimer(self._metrics, call.started_at, choice.num_prompt_tokens) for choice in call.choices]
        pairs = zip(call.choices, timers, strict=True)
        runs = [
            BeamRun(self._backend, choice, rules, timer, self._settings.failover_timeout_s) for choice, timer in pairs
        ]
        left_s = self._settings.request_timeout_s - (self._metrics.clock() - call.started_at)
        found = await all_of(run.run(left_s) for run in runs)
        usage = _usage(call)
        usage.num_completion = sum(len(beam.token_ids) for beams in found for beam in beams)
        usage.num_cached = sum(run.num_cached for run in runs)
        answer = await self._pool.run(lambda: _envelope(call).answer(self._texts(call, found), usage))
        await send_json(send, answer, headers=mode_headers(runs[0].mode))

    def _texts(self, call: Call, found: Sequence[Sequence[Beam]]) -> list[TextDelta]:
        """The beams of each prompt as choices of the answer."""
        pairs = zip(call.choices, found, strict=True)
        return numbered([self._text(call, choice, beam) for choice, beams in pairs for beam in beams])

    def _text(self, call: Call, choice: Choice, beam: Beam) -> TextDelta:
        text = ChoiceText(choice.index, choice.prompt_token_ids, self._tokenizer, call.rules, choice.echo)
        finish = EndReason.STOP if beam.is_stopped else EndReason.LENGTH
        return joined(text.push(TokenDelta(beam.token_ids, finish, logprobs=beam.logprobs)))

    async def _whole(self, call: Call, send: Send) -> None:
        deltas: list[list[TextDelta]] = [[] for _ in call.choices]
        usage = _usage(call)
        async with self._start(call) as streams:
            while batch := await streams.next():
                for delta in batch:
                    deltas[delta.index].append(delta)
                    usage.num_completion += delta.num_tokens
            usage.num_cached = streams.num_cached
        answer = await self._make(lambda: _envelope(call).answer(_answered(call, deltas), usage), deltas)
        await send_json(send, answer, headers=mode_headers(streams.mode))

    async def _make(self, make: Callable[[], _T], deltas: Iterable[Sequence[TextDelta]]) -> _T:
        """What `make` gives; beside the loop if it is much, so that others do not wait."""
        is_much = sum(len(delta.tokens) + len(delta.prompt or ()) for part in deltas for delta in part) > FEW_TOKENS
        return await self._pool.run(make) if is_much else make()

    async def _streamed(self, call: Call, options: StreamOptions, send: Send) -> None:
        events = EventStream(send)
        try:
            async with self._start(call) as streams:
                await self._stream_events(call, options, streams, events)
        except (ApiError, BackendError) as error:
            await _fail(events, error)
        except Exception:
            if not events.is_started:
                raise
            _LOG.exception("a streamed answer failed")
            await events.fail(error_body(InternalError()))

    async def _stream_events(
        self, call: Call, options: StreamOptions, streams: ChoiceStreams, events: EventStream
    ) -> None:
        chunks = ChunkMaker(call, options)
        batch = await streams.next()
        await events.start(mode_headers(streams.mode))
        await events.write(chunks.opening())
        while batch is not None:
            made = partial(chunks.of, batch, streams.num_cached)
            await events.write(await self._make(made, [batch]))
            batch = await self._next(streams, events)
        await events.write(chunks.closing())
        await events.finish()

    async def _next(self, streams: ChoiceStreams, events: EventStream) -> list[TextDelta] | None:
        """The next deltas, with comments into the silence before them."""
        while True:
            try:
                async with asyncio.timeout(self._settings.sse_comment_s):
                    return await streams.next()
            except TimeoutError:
                await events.write_comment()

    def _start(self, call: Call) -> ChoiceStreams:
        streams = ChoiceStreams(
            self._backend,
            self._tokenizer,
            self._metrics,
            rules=call.rules,
            max_buffered=self._settings.stream_buffer_tokens,
        )
        return streams.start(call.choices, call.started_at)


class ChunkMaker:
    """Makes the chunks of one stream. Usage in chunks is that of the whole call so far."""

    def __init__(self, call: Call, options: StreamOptions) -> None:
        self._call = call
        self._options = options
        self._envelope = _envelope(call)
        self._usage = _usage(call)

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before any text: the roles of a chat."""
        openings = [self._call.shape.opening(choice.index) for choice in self._call.choices]
        return [self._chunk(opening) for opening in openings if opening is not None]

    def of(self, batch: list[TextDelta], num_cached: int) -> list[dict[str, Any]]:
        """One chunk a token that has text, or ends its choice, or is told how likely it was. Other tokens only count.
        `num_cached`: prompt tokens of the call so far that were found in a prefix cache."""
        chunks = []
        self._usage.num_cached = num_cached
        for delta in batch:
            self._usage.num_completion += delta.num_tokens
            if delta.text or delta.tokens or delta.prompt is not None or delta.finish_reason is not None:
                shape = self._call.shape
                chunks.append(self._chunk(shape.chunk_choice(delta), shape.beside_choices([delta])))
        return chunks

    def closing(self) -> list[dict[str, Any]]:
        """The usage chunk, if it was asked for."""
        if not self._options.include_usage:
            return []
        return [{**self._envelope.chunk([]), "usage": self._usage.to_json()}]

    def _chunk(self, choice: dict[str, Any], more: dict[str, Any] | None = None) -> dict[str, Any]:
        chunk = self._envelope.chunk([choice], more)
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._usage.to_json()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """All deltas of a finished choice in one."""
    assert deltas, "a choice has at least its end"
    return TextDelta(
        deltas[0].index,
        "".join(delta.text for delta in deltas),
        sum(delta.num_tokens for delta in deltas),
        deltas[-1].finish_reason,
        tuple(token for delta in deltas for token in delta.tokens),
        deltas[0].prompt,
    )


def _answered(call: Call, deltas: Sequence[Sequence[TextDelta]]) -> list[TextDelta]:
    """The choices of the answer, each in one piece. `deltas`: those of each choice that was generated."""
    wholes = [joined(parts) for parts in deltas]
    if call.num_kept is None:
        return wholes
    firsts = [place for place, choice in enumerate(call.choices) if choice.is_first]
    ends = [*firsts[1:], len(wholes)]
    groups = [wholes[first:end] for first, end in zip(firsts, ends, strict=True)]
    return numbered([whole for group in groups for whole in best_of(group, call.num_kept)])


async def run_until_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs `work`, and cancels it if the client disconnects first. Returns or raises once it is over."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_over = task.done()
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if is_over:
        task.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _fail(events: EventStream, error: ApiError | BackendError) -> None:
    """Raises `error` if it can still become an HTTP status, else ends the stream with it."""
    if not events.is_started:
        raise error
    await events.fail(error_body(error))


def _envelope(call: Call) -> Envelope:
    # The id is ours alone, whatever the client sends as X-Request-Id.
    return Envelope(f"{call.shape.id_prefix}-{uuid.uuid4().hex}", int(time.time()), call.model, call.shape)


def _usage(call: Call) -> Usage:
    return Usage(num_prompt=sum(choice.num_prompt_tokens for choice in call.choices))
