"""The input of `kvsplice generate`: a file of prompts, one JSON object a line.

    {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    {"messages": [{"role": "user", "content": "Hello"}], "custom_id": "greeting"}

A line's seed comes from the run's seed and the line's number, so it is the same whatever has been computed before. Its
digest covers all that decides about its result but the model (`launcher/result_digest.py`): whoever goes on with a
half-done run notices what has changed.
"""

import hashlib
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from engine.errors import RejectedError
from engine.offline_sampling import SamplingParams
from kvtransfer.errors import SettingsError
from launcher.errors import LineError

MAX_LINE_BYTES: Final = 64 << 20
MAX_ID_CHARS: Final = 512
_OWN_FIELDS: Final = ("prompt", "messages", "custom_id")


@dataclass(frozen=True)
class PromptLine:
    """One line, checked as far as that needs no model. `number` counts from 1. `prompt` is text or token ids; either it
    or `messages` is None."""

    number: int
    prompt: Any
    messages: Any
    custom_id: str | None
    params: SamplingParams
    digest: str


@dataclass(frozen=True)
class LineDefaults:
    """What a line's result depends on beside the line. `engine`: settings that change results."""

    sampling: Mapping[str, Any]
    seed: int
    engine: Mapping[str, Any]

    def seed_of(self, number: int) -> int:
        """63 bits, drawn from the run's seed for line `number`."""
        digest = hashlib.blake2b(struct.pack("<qQ", self.seed, number), digest_size=8, person=b"kvsplice line")
        return int.from_bytes(digest.digest(), "little") >> 1


def open_lines(path: str) -> IO[bytes]:
    """The input, which is read more than once: what can be read only once (a pipe) is copied to the disk before. Raises
    SettingsError."""
    try:
        source = sys.stdin.buffer if path == "-" else Path(path).open("rb")  # noqa: SIM115  # closed by the caller
        if source.seekable():
            return source
        with source:
            copy = tempfile.TemporaryFile(prefix="kvsplice-input-")  # noqa: SIM115  # closed by the caller
            shutil.copyfileobj(source, copy)
        return copy
    except OSError as error:
        raise SettingsError(f"--input: cannot read {path}: {error.strerror}") from error


def read_lines(file: IO[bytes], defaults: LineDefaults) -> Iterator[PromptLine]:
    """All lines but empty ones, checked, one after another. Raises LineError at the first that is wrong."""
    file.seek(0)
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise LineError(number, f"is longer than {MAX_LINE_BYTES} bytes")
        if line.strip():
            yield parse_line(number, line, defaults)


def parse_line(number: int, line: bytes, defaults: LineDefaults) -> PromptLine:
    """Raises LineError."""
    fields = _object_in(number, line)
    if ("prompt" in fields) == ("messages" in fields):
        raise LineError(number, 'needs either "prompt" or "messages"')
    custom_id = fields.get("custom_id")
    if custom_id is not None and not (isinstance(custom_id, str) and len(custom_id) <= MAX_ID_CHARS):
        raise LineError(number, f"custom_id: must be text of at most {MAX_ID_CHARS} characters")
    own = {name: value for name, value in fields.items() if name not in _OWN_FIELDS}
    try:
        params = SamplingParams.of({**defaults.sampling, "seed": defaults.seed_of(number), **own})
    except RejectedError as error:
        raise LineError(number, str(error)) from None
    prompt, messages = fields.get("prompt"), fields.get("messages")
    sampling = {**asdict(params), "logit_bias": sorted(params.logit_bias.items())}
    digest = _digest([prompt, messages, custom_id, sampling, dict(defaults.engine)])
    return PromptLine(number, prompt, messages, custom_id, params, digest)


def _object_in(number: int, line: bytes) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.ValidationError:
        raise LineError(number, "is no JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError(number, f"is not valid JSON: {error}") from None
    return fields


def _digest(parts: list[Any]) -> str:
    encoded = msgspec.json.encode(parts, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=8, person=b"kvsplice prompt").hexdigest()
