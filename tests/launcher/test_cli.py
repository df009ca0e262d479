"""The command line's own words; what roles do with theirs is tested where the roles are."""

import subprocess
import sys
import types

import pytest

from kvtransfer.curve import CurveKeys, private_path, write_pair
from launcher.cli import COMMANDS, main


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in COMMANDS)


@pytest.mark.parametrize(
    ("argv", "words"), [([], "a command is needed"), (["sevre"], "unknown command 'sevre'"), (["--verbose"], "unknown")]
)
def test_wrong_command(capsys, argv, words):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode"])
def test_roles_get_their_arguments(monkeypatch, role):
    seen = []
    fake = types.ModuleType(f"{role}.__main__")
    fake.main = lambda argv: seen.append(argv) or 5
    monkeypatch.setitem(sys.modules, f"{role}.__main__", fake)
    assert main([role, "--port", "1"]) == 5
    assert seen == [["--port", "1"]]


@pytest.mark.parametrize("command", ["serve", "fetch-model"])
def test_wrong_settings_are_one_line(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([command, "--modle", "x"])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(f"kvsplice {command}: error: ")
    assert error.count("\n") == 1


def test_fetch_model_prints_a_local_folder(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert main(["fetch-model", "--model", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_keys_makes_what_the_roles_load_and_says_what_belongs_where(capsys, tmp_path):
    assert main(["keys", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for name in ("gateway", "prefill", "decode", "worker"):
        assert CurveKeys.load(tmp_path, name).name == name
        assert str(private_path(tmp_path, name)) in out
    assert str(tmp_path / "public") in out
    assert main(["keys", str(tmp_path), "decode-1", "decode-1"]) == 0
    assert set(CurveKeys.load(tmp_path, "decode-1").known) == {"gateway", "prefill", "decode", "worker", "decode-1"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "takes a folder and names"),
        (["--force", "{}"], "takes a folder and names"),
        (["{}", "new", "decode"], "decode.key is there already; nothing was made"),
        (["{}", "a/b"], "NAME takes a letter or digit"),
        (["/dev/null/keys"], "cannot write"),
    ],
)
def test_keys_makes_all_or_nothing(capsys, tmp_path, words, error):
    write_pair(tmp_path, "decode")
    with pytest.raises(SystemExit) as ended:
        main(["keys", *(word.format(tmp_path) for word in words)])
    line = capsys.readouterr().err
    assert ended.value.code == 2
    assert line.startswith("kvsplice keys: error: ")
    assert line.count("\n") == 1
    assert error in line
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["decode.key", "decode.key_secret"]


def test_keys_explains_itself(capsys):
    assert main(["keys", "--help"]) == 0
    assert "usage: kvsplice keys DIR [NAME ...]" in capsys.readouterr().out


def test_flags_takes_no_arguments(capsys):
    assert main(["flags"]) == 0
    assert "| `--max-num-batched-tokens` | serve, prefill, worker, generate | 512 |" in capsys.readouterr().out
    assert main(["flags", "x"]) == 2


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_explains_itself(flag, capsys):
    for command in COMMANDS:
        try:
            code = main([command, flag])
        except SystemExit as ended:
            code = ended.code
        assert code == 0, command
        assert f"usage: kvsplice {command}" in capsys.readouterr().out


def test_the_command_line_imports_neither_torch_nor_transformers():
    script = "import sys, launcher.cli, launcher.serve; print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
