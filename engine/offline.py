"""Generation in the caller's own process, without a server:

    from engine.offline import LLM, SamplingParams

    with LLM("smollm2-135m") as llm:
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0)):
            print(output.outputs[0].text)

Model, KV pool, batches, sampler and text are those of the server, so the tokens are too: greedy ones, and drawn ones of
equal seeds (up to near-ties).

1. `generate` turns all prompts into token ids and checks them, before anything is computed.
2. Requests go into the scheduler in order, so many at a time that it never runs dry.
3. Each step computes chunks of prompts and a token of each running request, all in one batch.
4. A request ends by its tokens in the scheduler, or by a stop string here. Its result is handed out at once.

Ctrl-C, an error, or a caller that wants no more of `generate_each` ends all requests; the LLM can be used again.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from tqdm import tqdm

from engine.assembly import Engine, assemble
from engine.config import DEFAULT_MODEL
from engine.deferred_interrupt import interrupt_deferred
from engine.errors import ArgumentTypeError, RejectedError, UsageError
from engine.local_role import LocalRole
from engine.local_scheduler import LocalLimits, LocalScheduler
from engine.offline_config import OfflineConfig, called_by_keyword
from engine.offline_jobs import Job, JobMaker, Prompt, type_name, without_array
from engine.offline_output import CompletionOutput, RequestOutput
from engine.offline_run import OfflineRun
from engine.offline_sampling import SamplingParams
from engine.offline_tokenizer import Message, OfflineTokenizer
from engine.queue_rules import QueueRules
from launcher.default_model import resolve_model

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_T = TypeVar("_T")

AHEAD: Final = 2
"""Requests in the scheduler for each that may run: when one ends, the next one is there."""


@dataclass(frozen=True)
class _Loaded:
    """What an LLM has until it is closed."""

    engine: Engine
    role: LocalRole


class LLM:
    """A model and its KV pool, loaded once. Not to be used from several threads at once."""

    def __init__(self, model: str | Path = DEFAULT_MODEL, *, seed: int | None = None, **settings: Any) -> None:
        """`model`: the embedded default's name, a checkpoint folder or a hub name. `seed`: of requests that bring none.
        `settings`: fields of `engine.offline_config.OfflineConfig`, such as dtype, max_model_len, max_num_seqs,
        block_size, enable_prefix_caching, kv_cache_gib, gpu_memory_utilization.

        Raises SettingsError, EngineError subclasses, and TypeError for settings that there are not.
        """
        if not isinstance(model, str | Path):
            raise ArgumentTypeError(f"model: must be a name or a folder, not {type_name(model)}")
        with called_by_keyword():
            self._set_up(OfflineConfig(model=str(model), default_seed=seed, **settings))

    @classmethod
    def of(cls, config: OfflineConfig) -> Self:
        """For a program whose own settings are flags: errors call them so."""
        llm = cls.__new__(cls)
        llm._set_up(config)
        return llm

    def _set_up(self, config: OfflineConfig) -> None:
        self.config = config
        folder = resolve_model(config.model)
        self._tokenizer = OfflineTokenizer.load(folder)
        self._loaded: _Loaded | None = _load(config, folder)
        self._jobs = JobMaker(self._tokenizer, self._loaded.role.check, self.max_model_len, config.default_seed)
        self._is_busy = False

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and output together."""
        return self._open.engine.max_model_len

    @property
    def weights_digest(self) -> str:
        """Of the weights that were loaded, as `engine.weights.weights_digest` has it."""
        return self._open.engine.fingerprint.weights

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer of the model."""
        return self._tokenizer.hf_tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The continuations of one prompt or of many, in the order of `prompts`. `sampling_params`: one for all, or one
        a prompt. Raises RejectedError, naming the prompt, before anything is computed; ArgumentTypeError, which is one
        and a TypeError, for what is none of these."""
        return self._run_all(_all_jobs(_prompts(prompts), sampling_params, self._jobs.of_prompt), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The model's answers to one chat or to many; a chat is a list of {"role": ..., "content": ...}."""
        make = partial(self._jobs.of_chat, add_generation_prompt=add_generation_prompt)
        return self._run_all(_all_jobs(_chats(messages), sampling_params, make), use_tqdm)

    @property
    def jobs(self) -> JobMaker:
        """Makes what `generate_each` takes."""
        return self._jobs

    def generate_each(self, jobs: Iterable[Job]) -> Generator[tuple[int, RequestOutput], None, None]:
        """(number of a job, its result) of each job, as they end. Takes `jobs` as there is room, so millions of them
        need no memory. To be read to its end, or closed, before the LLM generates anything else."""
        role = self._open.role
        if self._is_busy:
            raise UsageError("this LLM is generating; end that first")
        self._is_busy = True
        try:
            yield from OfflineRun(role, map(_as_job, jobs), AHEAD * self.config.max_num_seqs, self._tokenizer.decode)
        finally:
            with interrupt_deferred():
                role.end_all()
                role.check_integrity()
                self._is_busy = False

    def reset_prefix_cache(self) -> None:
        """Forgets the KV that earlier prompts have left."""
        self._open.role.reset_prefix_cache()

    def close(self) -> None:
        """Gives the model and its memory back."""
        self._loaded = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _open(self) -> _Loaded:
        if self._loaded is None:
            raise UsageError("this LLM is closed")
        return self._loaded

    def _run_all(self, jobs: Sequence[Job], use_tqdm: bool) -> list[RequestOutput]:
        results: dict[int, RequestOutput] = {}
        with (
            tqdm(total=len(jobs), desc="Generating", unit="prompt", disable=not use_tqdm) as bar,
            closing(self.generate_each(jobs)) as ended,
        ):
            for number, result in ended:
                results[number] = result
                bar.update()
        return [results[number] for number in range(len(jobs))]


def _as_job(given: Any) -> Job:
    if not isinstance(given, Job):
        raise ArgumentTypeError(f"jobs: must be such as LLM.jobs makes, not {type_name(given)}")
    return given


def _all_jobs(
    prompts: Sequence[_T],
    params: SamplingParams | Sequence[SamplingParams] | None,
    make: Callable[[_T, SamplingParams], Job],
) -> list[Job]:
    """A job a prompt. Raises RejectedError, which names the prompt if there are several."""
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if not _is_list(params):
        raise ArgumentTypeError(f"sampling_params: must be SamplingParams, or a list of them, not {type_name(params)}")
    if len(params) != len(prompts):
        raise RejectedError(f"{len(prompts)} prompts, but {len(params)} sampling params")
    jobs = []
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        try:
            jobs.append(make(prompt, own))
        except RejectedError as error:
            raise type(error)(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
    return jobs


def _prompts(given: Any) -> Sequence[Prompt]:
    """One prompt, as text or token ids, as a list of one."""
    given = without_array(given)
    if isinstance(given, str):
        return [given]
    if not _is_list(given):
        raise ArgumentTypeError(
            f"prompts: must be text, a list of token ids, or a list of these, not {type_name(given)}"
        )
    return [given] if len(given) > 0 and isinstance(given[0], int) else given


def _chats(given: Any) -> Sequence[Sequence[Message]]:
    """One chat as a list of one."""
    if not _is_list(given):
        raise ArgumentTypeError(
            f"messages: must be a chat, which is a list, or a list of chats, not {type_name(given)}"
        )
    return [given] if len(given) > 0 and isinstance(given[0], Mapping) else given


def _is_list(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)


def _load(config: OfflineConfig, folder: Path) -> _Loaded:
    engine = assemble(config.engine, folder, config.max_step_tokens, record_decode=not config.enforce_eager)
    rules = QueueRules(AHEAD * config.max_num_seqs, share_prefixes=config.enable_prefix_caching)
    limits = LocalLimits(config.max_num_batched_tokens, config.max_num_seqs, engine.max_model_len)
    return _Loaded(engine, LocalRole(engine, LocalScheduler(engine.pool, rules, limits, engine.eos_token_ids)))
