"""Clients: each asks one gateway one thing, and reads, dawdles, or leaves."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from msgspec import structs

from gateway.backend import BackendError, TokenDelta, Traits
from gateway.gathering import Gathering
from gateway.modes import Mode
from kvtransfer.request_parts import EndReason, SamplingParams, TokenLogprob
from tests.simulation.config import WorldConfig
from tests.simulation.errors import require
from tests.simulation.gateway_node import GatewayNode
from tests.simulation.model import FIRST_TEXT_TOKEN, VOCAB_SIZE, HashModel

MODES = (Mode.DISAGGREGATED, None, Mode.LOCAL)
MODE_WEIGHTS = (5, 3, 1)  # most trouble is where KV travels


@dataclass(frozen=True)
class Ask:
    """What one client will do. `leave_after`, `dawdle`: seconds, if at all. `num_choices` of one prompt begin together;
    each is read for itself, and those in `cut_short` are left after so many tokens, as by a stop string."""

    name: str
    at: float
    gateway: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    traits: Traits
    leave_after: float | None = None
    dawdle: float | None = None
    is_possible: bool = True
    num_choices: int = 1
    cut_short: Mapping[int, int] = field(default_factory=dict)

    def choice(self, index: int) -> "Ask":
        """One of several as a call by itself."""
        if self.num_choices == 1:
            return self
        # Of several choices none is told of the prompt: the gateway and workers refuse it.
        sampling = structs.replace(self.sampling, choice_index=index, num_prompt_logprobs=None)
        return replace(self, name=f"{self.name}.{index}", sampling=sampling)


class State(Enum):
    """How a client's call stands."""

    WAITING = "waiting"  # has been sent, or reads
    FINISHED = "finished"  # has the whole answer
    FAILED = "failed"  # got one error
    LEFT = "left"  # left by itself
    CUT_OFF = "cut off"  # its gateway died


class Client:
    """One choice of one call. Every token is compared as it comes."""

    def __init__(self, ask: Ask, node: GatewayNode, model: HashModel, gathering: Gathering[Any] | None = None) -> None:
        self.ask = ask
        self._gathering = gathering
        self._stop_at = ask.cut_short.get(ask.sampling.choice_index)
        self.node = node
        self.state = State.WAITING
        self.error: BackendError | None = None
        self.tokens: list[int] = []
        self._model = model
        self._expected, self._finish = model.answer(ask.prompt, ask.sampling) if ask.is_possible else ([], None)
        self._task = node.loop.create_task(self._run())
        self._task.add_done_callback(self._on_done)
        if ask.leave_after is not None:
            node.timeline.after(ask.leave_after, self._task.cancel)

    @property
    def is_over(self) -> bool:
        return self.state is not State.WAITING

    def cut_off(self) -> None:
        """Its gateway is dead."""
        if not self.is_over:
            self._move(State.CUT_OFF)

    async def _run(self) -> None:
        try:
            await self._read()
        except BackendError as error:
            if self.node.is_alive:
                self.error = error
                self._move(State.FAILED)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        """A call may be given up before it has begun."""
        if not self.node.is_alive:
            self.cut_off()
        elif task.cancelled() and self.state is not State.LEFT:
            self._move(State.LEFT)
        elif not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _read(self) -> None:
        ask, dispatcher = self.ask, self.node.dispatcher
        stream = dispatcher.generate(
            ask.prompt, ask.sampling, ask.traits, arrived_at=self.node.timeline.now, gathering=self._gathering
        )
        try:
            async for delta in stream:
                self._check_likelihoods(delta)
                self._take(delta.token_ids, delta.finish)
                if self._has_enough and not self.is_over:
                    self._move(State.LEFT)
                    return
                if ask.dawdle is not None:
                    await asyncio.sleep(ask.dawdle)
        finally:
            await stream.aclose()
        require(self.state is State.FINISHED, self.ask.name, "has a stream that ended without a last word")

    @property
    def _has_enough(self) -> bool:
        return self._stop_at is not None and len(self.tokens) >= self._stop_at

    def _check_likelihoods(self, delta: TokenDelta) -> None:
        """Each token's, and with the first one those of the prompt, if they were asked for, and no others."""
        ask, tokens = self.ask, [*self.tokens, *delta.token_ids]
        behind = [*ask.prompt, *tokens]
        expected: list[TokenLogprob] = []
        if ask.sampling.num_logprobs is not None:
            expected = self._model.likelihoods(behind, len(behind) - len(delta.token_ids))
        require(list(delta.logprobs) == expected, ask.name, "is told", delta.logprobs, "not", expected)
        is_due = ask.sampling.num_prompt_logprobs is not None and not self.tokens
        scores = tuple(self._model.likelihoods(ask.prompt, 1)) if is_due else None
        require(delta.prompt_logprobs == scores, ask.name, "is told of its prompt", delta.prompt_logprobs)

    def _take(self, token_ids: tuple[int, ...], finish: EndReason | None) -> None:
        require(not self.is_over, self.ask.name, "got more after the end")
        start = len(self.tokens)
        self.tokens += token_ids
        expected = self._expected[start : len(self.tokens)]
        require(list(token_ids) == expected, self.ask.name, "got", token_ids, "at", start, "not", expected)
        if finish is not None:
            require(self.tokens == self._expected, self.ask.name, "finished after", len(self.tokens), "tokens")
            require(finish is self._finish, self.ask.name, "finished with", finish, "not", self._finish)
            self._move(State.FINISHED)

    def _move(self, state: State) -> None:
        if state is State.LEFT and self.state is State.FINISHED:
            return  # left while it read the last tokens
        require(not self.is_over, self.ask.name, "ended twice:", self.state, state)
        self.state = state
        self.node.note(f"{self.ask.name} {state.value} with {len(self.tokens)} tokens {self.error or ''}")


def draw_asks(rng: random.Random, config: WorldConfig) -> list[Ask]:
    """All calls of a world, some of them together."""
    asks, bursts = [], [rng.uniform(0.0, config.trouble_s) for _ in range(3)]
    prompts: list[tuple[int, ...]] = []
    for number in range(config.num_requests):
        at = rng.choice(bursts) if rng.random() < 0.5 else rng.uniform(0.0, config.trouble_s)
        prompts.append(_draw_prompt(rng, config, prompts))
        asks.append(_draw_ask(rng, config, f"c{number}", at + _head_start(config), prompts[-1]))
    return asks


def _head_start(config: WorldConfig) -> float:
    """Seconds that the workers get to register where nothing may fail."""
    return 0.0 if config.num_faults else 2.0


def _draw_prompt(rng: random.Random, config: WorldConfig, others: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Some are those of others: the same, with another end, or with another beginning."""
    length = rng.choice((1, rng.randint(1, config.max_model_len - 1), config.max_model_len - 1, rng.randint(1, 8)))
    fresh = tuple(rng.randrange(FIRST_TEXT_TOKEN, VOCAB_SIZE) for _ in range(length))
    if not others or rng.random() >= config.same_prompt:
        return fresh
    other = rng.choice(others)
    cut = rng.randint(1, len(other))
    return rng.choice((other, (*other[:cut], *fresh)[: config.max_model_len - 1], (fresh[0], *other[1:])))


def _draw_ask(rng: random.Random, config: WorldConfig, name: str, at: float, prompt: tuple[int, ...]) -> Ask:
    room = config.max_model_len - len(prompt)
    max_tokens = rng.choice((room, rng.randint(1, room), min(room, rng.choice((1, 2, 3, room)))))
    is_possible = config.is_calm or rng.random() > 0.05
    sampling = SamplingParams(
        max_tokens=max_tokens if is_possible else room + 1,
        seed=rng.choice((0, rng.randint(-9, 9))),
        ignore_eos=rng.random() < 0.3,
        min_tokens=rng.choice((0, 0, min(3, max_tokens))),
        num_logprobs=0 if sum(prompt) % 2 else None,
        num_prompt_logprobs=0 if prompt[-1] % 4 == 0 else None,
    )
    may_leave = not config.is_calm
    return Ask(
        name=name,
        at=at,
        gateway=rng.randrange(config.num_gateways),
        prompt=prompt,
        sampling=sampling,
        traits=Traits(rng.choice(("", "", "salt")), rng.randint(-1, 1), rng.choices(MODES, MODE_WEIGHTS)[0]),
        leave_after=rng.choice(_leaves(rng)) if may_leave and rng.random() < 0.3 else None,
        num_choices=rng.choice((2, 3, 5)) if rng.random() < config.several_choices else 1,
        cut_short={rng.randrange(5): rng.randint(1, 3) for _ in range(rng.choice((0, 0, 1, 3)) if may_leave else 0)},
        dawdle=rng.uniform(0, 0.1) if may_leave and rng.random() < 0.2 else None,
        is_possible=is_possible,
    )


def _leaves(rng: random.Random) -> tuple[float, ...]:
    """At once, in the middle of things, or late."""
    return (0.0, rng.uniform(0, 0.1), rng.uniform(0, 1.0))
