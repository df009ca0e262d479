"""Compiles the C++ sources of this package for this machine's CPU, once, and keeps the result.

    CACHE/kernels/cpu-KEY.so    KEY: digest of sources, flags, compiler version and the instruction sets it targets
    CACHE/kernels/.cpu-XXXX/    work in progress; the result appears by one rename, so processes may build at once

CACHE is the folder that the default model is kept in: $KVSPLICE_CACHE, else $XDG_CACHE_HOME/kvsplice, else
~/.cache/kvsplice. The compiler is $CXX, else g++.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kernels.errors import UnavailableBackendError

SOURCES: Final = Path(__file__).resolve().parent / "source"
NATIVE: Final = ("-march=native",)
"""Flags that choose the instruction sets: all that this CPU has."""

_FLAGS: Final = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-fno-semantic-interposition",  # our functions call each other directly
    "-fno-math-errno",  # lets sqrt be one instruction; neither flag changes a result
    "-fno-trapping-math",  # lets comparisons be masks
    "-fno-strict-aliasing",  # pairs of bfloat16 move as 32-bit units
)
_X86_FLAGS: Final = ("-mprefer-vector-width=512",)  # g++ would use halves of what the accumulators are laid out for
_TIMEOUT_S: Final = 300
_SHOWN_LINES: Final = 3


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where built libraries are kept."""
    if environ.get("KVSPLICE_CACHE"):
        return Path(environ["KVSPLICE_CACHE"]).expanduser().absolute() / "kernels"
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "kvsplice" / "kernels"
    return Path.home() / ".cache" / "kvsplice" / "kernels"


def build(
    folder: Path, *, target: Sequence[str] = NATIVE, sources: Path = SOURCES, environ: Mapping[str, str] = os.environ
) -> Path:
    """The shared library, compiled now if `folder` does not hold it. Raises UnavailableBackendError saying why not."""
    compiler = _find_compiler(environ)
    flags = (*_FLAGS, *(_X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ()), *target)
    library = folder / f"cpu-{_key(compiler, flags, sources)}.so"
    if not library.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _compile(compiler, flags, sources, library)
        except OSError as error:
            raise UnavailableBackendError(f"cannot write to {folder}: {error.strerror}") from error
    return library


def _find_compiler(environ: Mapping[str, str]) -> str:
    name = environ.get("CXX") or "g++"
    compiler = shutil.which(name, path=environ.get("PATH"))
    if compiler is None:
        raise UnavailableBackendError(f"there is no C++ compiler ({name} is not on the path)")
    return compiler


def _key(compiler: str, flags: Sequence[str], sources: Path) -> str:
    """Whatever changes the library changes the key. The compiler's predefined macros name its version and, under
    -march=native, every instruction set of this CPU."""
    macros = _run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull], "-march=native is not understood by it")
    digest = hashlib.sha256(repr((compiler, flags, macros)).encode())
    for file in sorted(sources.iterdir()):
        digest.update(f"{file.name} ".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def _compile(compiler: str, flags: Sequence[str], sources: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".cpu-", dir=library.parent) as work:
        result = Path(work) / library.name
        files = sorted(str(file) for file in sources.glob("*.cpp"))
        _run([compiler, *flags, "-o", str(result), *files], "the build failed")
        result.replace(library)


def _run(command: Sequence[str], what: str) -> str:
    """What the command prints. Raises UnavailableBackendError with `what` and the first lines of its complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableBackendError(f"{command[0]}: {what}: {error}") from error
    if done.returncode != 0:
        complaint = " | ".join(done.stderr.strip().splitlines()[:_SHOWN_LINES])
        raise UnavailableBackendError(f"{command[0]}: {what}: {complaint}")
    return done.stdout
