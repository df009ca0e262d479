"""The output of `kvsplice generate` after any death: what is whole stays, what is torn goes, others' files are safe."""

import os

import msgspec
import pytest

from kvtransfer.errors import SettingsError
from launcher.result_file import SYNC_EVERY_S, Result, ResultFile, Usage


def result(line, text="some text", custom_id=None):
    return Result(line, text, "stop", Usage(3, 4), f"{line:016x}", custom_id)


def written(path, *lines):
    file = ResultFile(path)
    for line in lines:
        file.write(result(line))
    file.close()
    return path.read_bytes()


def test_what_is_there_is_done(tmp_path):
    path = tmp_path / "out.jsonl"
    written(path, 3, 1)
    file = ResultFile(path)
    assert file.done == {3: f"{3:016x}", 1: f"{1:016x}"}
    file.write(result(2, "snow ☃ \n", "two"))
    file.close()
    lines = [msgspec.json.decode(line, type=Result) for line in path.read_bytes().splitlines()]
    assert lines == [result(3), result(1), result(2, "snow ☃ \n", "two")]


def test_a_line_torn_anywhere_is_removed(tmp_path):
    path = tmp_path / "out.jsonl"
    whole = written(path, 1)
    both = written(path, 2)
    for length in range(len(whole), len(both)):
        path.write_bytes(both[:length])
        file = ResultFile(path)
        assert file.done == {1: f"{1:016x}"}
        file.write(result(2))
        file.close()
        assert path.read_bytes() == both


@pytest.mark.parametrize(
    "content",
    [
        b"a diary\n",
        b"a diary",
        b'{"prompt": "an input file"}\n',
        b'{"line":1}\n',
        b'{"line":0,"text":"","finish_reason":"stop","usage":{"prompt_tokens":1,"completion_tokens":1},"digest":"0"}\n',
        b"\x00" * 10,
    ],
)
def test_a_file_of_somebody_else_is_left_alone(tmp_path, content):
    path = tmp_path / "diary"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match="is no result of kvsplice generate"):
        ResultFile(path)
    assert path.read_bytes() == content
    good = written(tmp_path / "out", 1)
    path.write_bytes(good + content)
    with pytest.raises(SettingsError, match="is no result of kvsplice generate"):
        ResultFile(path)
    assert path.read_bytes() == good + content


def test_one_run_at_a_time(tmp_path):
    first = ResultFile(tmp_path / "out")
    with pytest.raises(SettingsError, match="another run is writing"):
        ResultFile(tmp_path / "out")
    first.close()
    ResultFile(tmp_path / "out").close()


@pytest.mark.parametrize(("path", "says"), [("/dev/null", "no ordinary file"), ("/nowhere/out", "cannot write")])
def test_where_no_file_can_be(path, says, tmp_path):
    from pathlib import Path

    with pytest.raises(SettingsError, match=says):
        ResultFile(Path(path))


def test_the_disk_is_waited_for_now_and_then_and_at_the_end(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    now = [0.0]
    file = ResultFile(tmp_path / "out", clock=lambda: now[0])
    file.write(result(1))
    assert synced == []
    now[0] = SYNC_EVERY_S
    file.write(result(2))
    file.write(result(3))
    assert len(synced) == 1
    file.close()
    assert len(synced) == 2
