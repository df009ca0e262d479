"""`kvsplice generate`: a file of prompts to a file of results, in this process, without a server.

1. Look at each line of the input, and at what the output holds already; whatever is wrong ends the run here.
2. Load the model, turn each prompt that is left into token ids, and check that it fits.
3. Read the input once more, as far as there is room in the scheduler, and write each result as it comes.

A run that was killed is gone on with by the same command. Results do not depend on that, nor on their order, up to
near-ties in the last bit of logits, which is what a batch's company may change: a line's draws come from its own seed.
"""

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, Final

from tqdm import tqdm

from engine.errors import RejectedError
from engine.offline import LLM, RequestOutput
from engine.offline_config import OfflineConfig
from engine.offline_jobs import Job
from kvtransfer.settings import options
from launcher.errors import ChangedInputError, LineError
from launcher.generate_config import GenerateConfig
from launcher.prompt_lines import LineDefaults, PromptLine, open_lines, read_lines
from launcher.result_digest import ResultDigests
from launcher.result_file import Result, ResultSink, Usage, open_results

RESULTS_DEPEND_ON: Final = ("dtype", "kv_cache_dtype", "max_model_len")
"""Settings of the engine, beside the checkpoint. The others change how fast results come, and in bfloat16 how near-ties
are rounded."""


def generate(config: GenerateConfig) -> int:
    """Runs to the end of the input; returns the exit code. Raises SettingsError, EngineError, OSError."""
    defaults = defaults_of(config)
    with closing(open_lines(config.input)) as source, closing(open_results(config.output)) as results:
        digests = ResultDigests(config.model)
        num_lines = check_lines(source, defaults, results, digests)
        if num_lines == len(results.done):
            _say(f"all {num_lines} lines are done")
            return 0
        digests.look()
        with LLM.of(engine_config(config, digests.folder)) as llm:
            digests.check_loaded(llm.weights_digest)
            todo = Todo(source, defaults, results, digests, llm)
            todo.check_all()
            todo.run(num_lines, config.progress)
    _say(f"{num_lines} lines done, {num_lines - todo.num_before} of them now")
    return 0


def defaults_of(config: GenerateConfig) -> LineDefaults:
    """What results depend on beside the lines and the model."""
    engine = {name: getattr(config, name) for name in RESULTS_DEPEND_ON}
    return LineDefaults(config.sampling, config.base_seed, engine)


def engine_config(config: GenerateConfig, folder: Path) -> OfflineConfig:
    """What an LLM takes, of the checkpoint in `folder`; seeds come with the lines."""
    names = {option.name for option in options(OfflineConfig)} - {"default_seed", "model"}
    values: dict[str, Any] = {name: getattr(config, name) for name in names}
    return OfflineConfig(model=str(folder), **values)


def check_lines(source: IO[bytes], defaults: LineDefaults, results: ResultSink, digests: ResultDigests) -> int:
    """The number of prompts. Raises LineError, before the model is looked for, and ChangedInputError if results are
    there that this input, these settings and this model would not give."""
    num_lines = sum(1 for _ in read_lines(source, defaults))
    num_done = 0
    for line in read_lines(source, defaults) if results.done else ():
        digest = results.done.get(line.number)
        if digest is not None:
            num_done += 1
            if digest != digests.of(line):
                raise ChangedInputError(line.number)
    if num_done < len(results.done):
        raise ChangedInputError(max(results.done))
    return num_lines


class Todo:
    """The lines without a result, and the LLM that makes these."""

    def __init__(
        self, source: IO[bytes], defaults: LineDefaults, results: ResultSink, digests: ResultDigests, llm: LLM
    ) -> None:
        self.num_before = len(results.done)
        self._source = source
        self._defaults = defaults
        self._results = results
        self._digests = digests
        self._llm = llm
        self._begun: dict[int, PromptLine] = {}  # by the number of their job, until their results are written

    def check_all(self) -> None:
        """Raises LineError for a line that the model can't do."""
        for line in self._lines():
            self._job(line)

    def run(self, num_lines: int, progress: bool) -> None:
        """Writes the results as they come."""
        bar = tqdm(total=num_lines, initial=self.num_before, desc="Generating", unit="line", disable=not progress)
        with bar, closing(self._llm.generate_each(self._jobs())) as ended:
            for number, output in ended:
                line = self._begun.pop(number)
                self._results.write(result_of(line, output, self._digests.of(line)))
                bar.update()

    def _lines(self) -> Iterator[PromptLine]:
        lines = read_lines(self._source, self._defaults)
        return (line for line in lines if line.number not in self._results.done)

    def _jobs(self) -> Iterator[Job]:
        for number, line in enumerate(self._lines()):
            self._begun[number] = line
            yield self._job(line)

    def _job(self, line: PromptLine) -> Job:
        try:
            if line.messages is not None:
                return self._llm.jobs.of_chat(line.messages, line.params)
            return self._llm.jobs.of_prompt(line.prompt, line.params)
        except RejectedError as error:
            raise LineError(line.number, str(error)) from None


def result_of(line: PromptLine, output: RequestOutput, digest: str) -> Result:
    (choice,) = output.outputs
    usage = Usage(len(output.prompt_token_ids), len(choice.token_ids))
    return Result(line.number, choice.text, choice.finish_reason, usage, digest, line.custom_id)


def _say(text: str) -> None:
    print(f"kvsplice generate: {text}", file=sys.stderr)
