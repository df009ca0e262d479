"""`kvsplice generate` as a process: results, what stops it, and that a killed run is gone on with."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.processes import REPOSITORY, clean_environment, wait_until
from tests.tiny_models import save_tiny_model

FLAGS = ("--dtype", "float32", "--device", "cpu", "--kv-cache-gib", "0.01", "--max-num-seqs", "4", "--no-progress")
DONE_WITHIN_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model("smollm2", tmp_path_factory.mktemp("generate"))


def start(folder, *flags, **more):
    command = [sys.executable, "-m", "launcher", "generate", "--model", str(folder), *FLAGS, *map(str, flags)]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=clean_environment(),
        stdin=more.get("stdin", subprocess.DEVNULL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(folder, *flags, stdin=None):
    """Exit code, standard output, standard error."""
    process = start(folder, *flags, stdin=subprocess.PIPE)
    try:
        out, err = process.communicate(stdin, timeout=DONE_WITHIN_S)
    finally:
        process.kill()
    return process.returncode, out.decode(), err.decode()


def write_prompts(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def results_in(path):
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda result: result["line"])


def test_each_line_has_its_result(folder, tmp_path):
    prompts = [
        {"prompt": "the quick", "custom_id": "text"},
        {"prompt": [10, 11, 12], "max_tokens": 3, "ignore_eos": True},
        {"messages": [{"role": "user", "content": "a request"}], "temperature": 0, "min_tokens": 2},
        {"prompt": "the quick", "custom_id": "again", "logit_bias": {"9": -100}},
    ]
    source = write_prompts(tmp_path / "in", prompts)
    code, out, err = run(folder, "--input", source, "--output", tmp_path / "out", "--max-tokens", 12)
    assert (code, out) == (0, ""), err
    assert "4 lines done, 4 of them now" in err
    results = results_in(tmp_path / "out")
    assert [result["line"] for result in results] == [1, 2, 3, 4]
    assert [result.get("custom_id") for result in results] == ["text", None, None, "again"]
    assert results[1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3}
    assert results[1]["finish_reason"] == "length"
    assert results[0]["text"] != results[3]["text"]  # equal prompts of one run draw by themselves


def test_from_standard_input_to_standard_output(folder, tmp_path):
    prompts = b'{"prompt": "the quick"}\n{"prompt": "prefill"}\n'
    code, out, err = run(folder, stdin=prompts)
    assert code == 0, err
    (tmp_path / "in").write_bytes(prompts)
    code, again, _ = run(folder, "--input", tmp_path / "in")
    assert code == 0
    assert sorted(out.splitlines()) == sorted(again.splitlines())
    assert len(out.splitlines()) == 2


NUM = 150
MANY = [{"prompt": [10 + index, 11, 12], "max_tokens": 5 + index % 30} for index in range(NUM)]
ALONE = ("--ignore-eos", "--max-num-seqs", "1")
"""Other company in a batch may change the last bit of logits, and so, once in tens of thousands, a draw."""


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    """Input and output of a run that nothing has interrupted."""
    place = tmp_path_factory.mktemp("undisturbed")
    source = write_prompts(place / "in", MANY)
    code, _, err = run(folder, "--input", source, "--output", place / "out", *ALONE)
    assert code == 0, err
    return source, place / "out"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_was_ended_is_gone_on_with(folder, undisturbed, tmp_path, number):
    source, expected = undisturbed
    output = tmp_path / "out"
    flags = ("--input", source, "--output", output, *ALONE)
    process = start(folder, *flags)
    try:
        wait_until(
            lambda: output.exists() and output.read_bytes().count(b"\n") >= 20, within_s=60, what="20 results are there"
        )
        process.send_signal(number)
        _, err = process.communicate(timeout=DONE_WITHIN_S)
    finally:
        process.kill()
    assert process.returncode == (-9 if number is signal.SIGKILL else 130), err.decode()
    assert b"Traceback" not in err
    num_before = output.read_bytes().count(b"\n")
    assert 20 <= num_before < NUM  # it was in the middle
    with output.open("ab") as file:
        file.write(expected.read_bytes()[:57])  # as if a write had been cut off
    code, _, err = run(folder, *flags)
    assert code == 0, err
    assert f"{NUM} lines done, {NUM - num_before} of them now" in err
    assert results_in(output) == results_in(expected)


def test_when_all_is_done_no_model_is_loaded(folder, undisturbed):
    source, output = undisturbed
    before = output.read_bytes()
    code, _, err = run(folder, "--input", source, "--output", output, *ALONE)
    assert code == 0
    assert f"all {NUM} lines are done" in err
    assert "loaded" not in err
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("lines", "flags"),
    [
        ([{"prompt": [99, 11, 12], "max_tokens": 5}, *MANY[1:]], ()),
        (MANY[:-1], ()),
        (MANY, ("--seed", "1")),
        (MANY, ("--temperature", "0.5")),
        (MANY, ("--max-model-len", "512")),
    ],
)
def test_results_of_something_else_are_noticed(folder, undisturbed, tmp_path, lines, flags):
    _, output = undisturbed
    before = output.read_bytes()
    source = write_prompts(tmp_path / "in", lines)
    code, _, err = run(folder, "--input", source, "--output", output, *ALONE, *flags)
    assert code == 2
    assert "other sampling settings, or another model" in err
    assert output.read_bytes() == before


def changed_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def changed_text(name, before, after):
    def change(folder):
        text = (folder / name).read_text()
        assert before in text
        (folder / name).write_text(text.replace(before, after, 1))

    return change


@pytest.mark.parametrize(
    "change",
    [
        changed_weight,
        changed_text("config.json", "{", '{"rope_theta": 7.0,'),
        changed_text("tokenizer.json", "{", "{ "),
    ],
    ids=["weight", "config", "tokenizer"],
)
def test_a_checkpoint_that_has_changed_under_its_name_is_noticed(folder, undisturbed, tmp_path, change):
    source, output = undisturbed
    before = output.read_bytes()
    same, changed = (shutil.copytree(folder, tmp_path / place / folder.name) for place in ("same", "changed"))
    change(changed)
    flags = ("--input", source, "--output", output, *ALONE)
    code, _, err = run(changed, *flags)
    assert code == 2
    assert "another model or state of it" in err
    code, _, err = run(same, *flags)
    assert (code, output.read_bytes()) == (0, before), err


def test_lines_are_checked_before_a_model_is_looked_for(tmp_path):
    source = write_prompts(tmp_path / "in", [{"prompt": "a"}, {"prompts": "b"}])
    code, _, err = run("/models/nowhere", "--input", source, "--output", tmp_path / "out")
    assert code == 2
    assert "line 2 of the input" in err


def test_lines_are_checked_before_a_model_is_looked_for_also_behind_those_that_are_done(undisturbed, tmp_path):
    _, done = undisturbed
    output = shutil.copy(done, tmp_path / "out")
    source = write_prompts(tmp_path / "in", [*MANY[:-1], {"prompts": "b"}])
    code, _, err = run("/models/nowhere", "--input", source, "--output", output, *ALONE)
    assert code == 2
    assert f"line {NUM} of the input" in err


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ({"prompt": "a", "max_token": 3}, "'max_token': unknown sampling field"),
        ({"prompt": [400]}, "holds token id 400"),
        ({"prompt": [5] * 1010}, "the model's length is 1024"),
        ({"prompt": {}}, "must be text or a list of token ids"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages: Expected str, got int"),
    ],
)
def test_nothing_is_computed_if_a_line_is_wrong(folder, tmp_path, last, says):
    source = write_prompts(tmp_path / "in", [{"prompt": "a"}] * 4 + [last])
    code, out, err = run(folder, "--input", source, "--output", tmp_path / "out")
    assert code == 2
    assert out == ""
    assert err.splitlines()[-1].startswith("kvsplice generate: error: line 5 of the input: ")
    assert says in err
    assert (tmp_path / "out").read_bytes() == b""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--input", "/nowhere/in"), "--input: cannot read /nowhere/in"),
        (("--temperature", "3"), "--temperature (KVSPLICE_TEMPERATURE) must be at most 2"),
        (("--gateway", "tcp://127.0.0.1:1"), "unrecognized arguments"),
    ],
)
def test_settings_that_are_wrong(folder, flags, says):
    code, _, err = run(folder, *flags)
    assert code == 2
    assert says in err.splitlines()[-1]


def test_what_the_model_does_not_allow_is_said_of_the_flag(folder, tmp_path):
    source = write_prompts(tmp_path / "in", [{"prompt": "a"}])
    code, _, err = run(folder, "--input", source, "--output", tmp_path / "out", "--max-model-len", "1000000")
    assert code == 2
    assert "error: --max-model-len 1000000 is more than the model's" in err.splitlines()[-1]
