"""Clients of a soak: each makes one random call after the other, and tries again what has failed."""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence

import httpx

from tests.e2e.load import Call, Outcome, OutcomeKind, play

RETRY_AFTER_S = 0.3


class Clients:
    """`count` threads over `known` calls, each with its answer. What they saw: `kinds`, and the details of the rest."""

    def __init__(self, http: httpx.Client, known: Sequence[tuple[Call, str]], count: int, seed: int) -> None:
        self._http = http
        self._known = known
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.kinds: Counter[OutcomeKind] = Counter()
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.num_retries = 0
        self._threads = [threading.Thread(target=self._run, args=(random.Random(seed + i),)) for i in range(count)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Lets each finish the call that it is at."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, rng: random.Random) -> None:
        while not self._stopping.is_set():
            call, answer = rng.choice(self._known)
            outcome = self._note(play(self._http, call, answer))
            while outcome.kind is not OutcomeKind.RIGHT and not self._stopping.is_set():
                time.sleep(RETRY_AFTER_S * (0.5 + rng.random()))
                with self._lock:
                    self.num_retries += 1
                outcome = self._note(play(self._http, call, answer))

    def _note(self, outcome: Outcome) -> Outcome:
        with self._lock:
            self.kinds[outcome.kind] += 1
            if outcome.kind is OutcomeKind.WRONG:
                self.wrong.append(outcome.detail)
            elif outcome.kind is not OutcomeKind.RIGHT:
                self.errors[outcome.detail] += 1
        return outcome
