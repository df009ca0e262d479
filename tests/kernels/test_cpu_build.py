"""Building the native kernels: kept, rebuilt when anything changes, by several processes at once, and not at all."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu.build import SOURCES, build, cache_folder
from kernels.cpu.library import open_library
from kernels.errors import UnavailableBackendError
from kernels.select import select_kernels
from launcher.default_model import _cache_folder as model_cache_folder

CPU = torch.device("cpu")
TINY = 'extern "C" int kvsplice_answer() { return 42; }\n'


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A source folder that compiles in no time."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(TINY)
    return folder


def test_a_second_build_is_the_first_one(tmp_path, sources):
    first = build(tmp_path / "cache", sources=sources)
    written = first.stat().st_mtime_ns
    assert build(tmp_path / "cache", sources=sources) == first
    assert first.stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name], "no work in progress is left"


def test_sources_and_flags_have_libraries_of_their_own(tmp_path, sources):
    first = build(tmp_path / "cache", sources=sources)
    flagged = build(tmp_path / "cache", sources=sources, target=("-DANYTHING",))
    (sources / "tiny.cpp").write_text(TINY.replace("42", "43"))
    changed = build(tmp_path / "cache", sources=sources)
    (sources / "more.h").write_text("")
    assert len({first, flagged, changed, build(tmp_path / "cache", sources=sources)}) == 4


def test_processes_may_build_at_once(tmp_path, sources):
    call = f"build(Path({str(tmp_path / 'c')!r}), sources=Path({str(sources)!r}))"
    script = f"from pathlib import Path; from kernels.cpu.build import build; print({call})"
    running = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=SOURCES.parents[2])
        for _ in range(3)
    ]
    answers = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(answers) == 1
    assert len(list((tmp_path / "c").iterdir())) == 1


def test_sources_are_part_of_the_package():
    assert {"attention.cpp", "linear.cpp", "rows.cpp", "common.h"} <= {file.name for file in SOURCES.iterdir()}


def test_broken_sources_say_what_the_compiler_says(tmp_path, sources):
    (sources / "tiny.cpp").write_text("int f( {\n")
    with pytest.raises(UnavailableBackendError, match=r"the build failed: .*tiny\.cpp:1"):
        build(tmp_path / "cache", sources=sources)
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_compiler(tmp_path, sources):
    with pytest.raises(UnavailableBackendError, match="no C\\+\\+ compiler"):
        build(tmp_path / "cache", sources=sources, environ={"PATH": str(tmp_path)})


def test_a_cache_that_cannot_be_written(tmp_path, sources):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableBackendError, match="cannot write to"):
        build(tmp_path / "file" / "cache", sources=sources)


def test_a_damaged_library(tmp_path):
    (tmp_path / "damaged.so").write_text("not a library")
    with pytest.raises(UnavailableBackendError, match="cannot load"):
        open_library(tmp_path / "damaged.so")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("KVSPLICE_CACHE", str(tmp_path))


@pytest.mark.usefixtures("no_compiler")
def test_auto_falls_back_with_one_warning_that_says_what_and_why(caplog):
    with caplog.at_level(logging.WARNING):
        assert select_kernels("auto", CPU).name == "reference"
    (record,) = caplog.records
    assert "plain torch" in record.getMessage()
    assert "no-such-compiler" in record.getMessage()


@pytest.mark.usefixtures("no_compiler")
def test_asked_for_by_name_it_is_an_error():
    with pytest.raises(UnavailableBackendError, match="no-such-compiler"):
        select_kernels("cpu", CPU)


@pytest.mark.parametrize(
    "environ", [{"KVSPLICE_CACHE": "/a/b"}, {"KVSPLICE_CACHE": "~/c"}, {"XDG_CACHE_HOME": "/x"}, {}]
)
def test_the_cache_is_beside_the_default_model(environ):
    assert cache_folder(environ) == model_cache_folder(environ) / "kernels"
