"""The two kinds of load, and the phases that are made of them.

Streams are a closed loop: each sends its next prompt when the last one is answered. Long prompts beside them are an
open loop: one goes out every so many seconds, whether or not those before it are answered. On an idle system they go
out at the same distance, but one by one: a worker that has just computed one is warmer than one that has rested.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from experiments.fresh_prompts import PromptSource
from experiments.mixed_summary import PhaseRecords
from experiments.stream_client import StreamClient
from experiments.stream_record import Outcome, StreamRecord

PAUSE_AFTER_FAILURE: Final = 0.5
"""Seconds: a server that refuses at once is not to be flooded."""
LAG_INTERVAL: Final = 0.02
"""Seconds between two looks at how late the client's own event loop is."""
PATIENCE: Final = 600.0
"""Seconds for one long prompt on an idle system."""


@dataclass(frozen=True)
class Shape:
    """What is sent. Lengths in tokens, times in seconds."""

    streams: int = 4
    stream_tokens: int = 64
    stream_output: int = 128
    long_tokens: int = 1500
    long_output: int = 8
    long_every: float = 6.0
    settle: float = 3.0  # at the start of each phase, not counted


class Traffic:
    """Sends the load of one phase after another."""

    def __init__(self, client: StreamClient, prompts: PromptSource, shape: Shape) -> None:
        self._client = client
        self._prompts = prompts
        self._shape = shape

    async def idle(self, num_prompts: int) -> tuple[StreamRecord, ...]:
        """Long prompts with nothing beside them, each behind a rest."""
        records: list[StreamRecord] = []
        due = time.monotonic()
        for _ in range(num_prompts):
            due += self._shape.long_every
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            records.append(await self._long_prompt(time.monotonic() + PATIENCE))
        return tuple(records)

    async def phase(self, seconds: float, *, with_long_prompts: bool) -> PhaseRecords:
        """Streams, with or without long prompts, until the window is over; then whatever still runs is cut."""
        start = time.monotonic() + self._shape.settle
        stop = start + seconds
        streams: list[StreamRecord] = []
        lags: list[float] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(self._shape.streams):
                group.create_task(self._stream_on(stop, streams))
            long_prompts = group.create_task(self._send_long_prompts(start, stop if with_long_prompts else start))
            group.create_task(_watch_lags(start, stop, lags))
        return PhaseRecords(start, stop, tuple(streams), tuple(long_prompts.result()), tuple(lags))

    async def _stream_on(self, stop: float, records: list[StreamRecord]) -> None:
        shape = self._shape
        while time.monotonic() < stop:
            prompt = self._prompts.take(shape.stream_tokens)
            records.append(await self._client.stream(prompt, shape.stream_output, stop))
            if records[-1].outcome is Outcome.FAILED:
                await asyncio.sleep(PAUSE_AFTER_FAILURE)

    async def _send_long_prompts(self, start: float, stop: float) -> list[StreamRecord]:
        """Sent on time; one that has no answer when the streams stop is waited for no longer."""
        tasks: list[asyncio.Task[StreamRecord]] = []
        due = start
        async with asyncio.TaskGroup() as group:
            while due < stop:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.append(group.create_task(self._long_prompt(stop, due)))
                due += self._shape.long_every
        return [task.result() for task in tasks]

    async def _long_prompt(self, stop_at: float, due: float | None = None) -> StreamRecord:
        prompt = self._prompts.take(self._shape.long_tokens)
        return await self._client.stream(prompt, self._shape.long_output, stop_at, due)


async def _watch_lags(start: float, stop: float, lags: list[float]) -> None:
    await asyncio.sleep(max(0.0, start - time.monotonic()))
    while (now := time.monotonic()) < stop:
        await asyncio.sleep(LAG_INTERVAL)
        lags.append(time.monotonic() - now - LAG_INTERVAL)
