"""`kvsplice serve` as a process: ready, sample, stop, and no orphan whatever happens to it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from launcher.cli import main
from launcher.config import ServeConfig
from launcher.errors import LaunchError, PortUnavailableError
from launcher.plan import Machine, plan
from launcher.ports import dial_host, usable_port
from launcher.probe import GatewayProbe, _texts, has_chat_template
from launcher.serve import _probe
from tests.launcher.children import is_running, wait_for

SERVE = """
import os, sys
import launcher.serve as serving
from kvtransfer.command_line import one_line_errors
from launcher.config import ServeConfig
from launcher.plan import ChildSpec
from pathlib import Path

def plan(config, model, machine, environ):
    gateway = (sys.executable, "-m", "tests.launcher.fake_gateway", str(machine.http_port), "child")
    worker = (sys.executable, "-c", WORKER)
    return [ChildSpec("gateway", gateway, environ), ChildSpec("prefill-0", worker, environ)]

serving.plan = plan
serving.resolve_model = lambda *args, **kwargs: Path(".")
config = ServeConfig(port=0, served_model_name=("tiny",), api_key="open-sesame", device="cpu")
with one_line_errors("kvsplice serve"):
    raise SystemExit(serving.serve(config, os.environ))
"""
GOOD_WORKER = """
import os, time
import launcher.child as child
child.run_command = lambda argv: print("pid", os.getpid(), flush=True) or time.sleep(60)
child.main([])
"""
BAD_WORKER = 'print("out of memory"); raise SystemExit(9)'


@pytest.fixture
def serve():
    """Starts the launcher around a worker script; kills what is left afterwards."""
    started = []

    def start(worker):
        script = f"WORKER = {worker!r}\n{SERVE}"
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def fake_gateway():
    """Starts gateways on free ports, which it returns; kills them afterwards."""
    started = []

    def start():
        port = usable_port("127.0.0.1", 0)
        command = [sys.executable, "-m", "tests.launcher.fake_gateway", str(port)]
        started.append(subprocess.Popen(command, env=os.environ))
        return port

    yield start
    for process in started:
        process.kill()
        process.wait()


def read_until(process, words):
    """The output up to and including the line with `words`."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError(f"no {words!r} in: {''.join(lines)}")


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ready_sample_stop(serve, signal_number):
    process = serve(GOOD_WORKER)
    output = read_until(process, "Ctrl-C stops it.")
    url = re.search(r"ready at (http://127\.0\.0\.1:\d+) \(\d+\.\d s\)", output)[1]
    assert output.startswith("kvsplice: starting 1 prefill and 1 decode worker...\n")
    assert f"curl -N {url}/v1/completions -H" in output
    assert "The capital of France is Paris, of course." in output
    assert "open-sesame" not in output
    worker = int(re.search(r"prefill-0 \| pid (\d+)", output)[1])
    assert is_running(worker)
    before = time.monotonic()
    process.send_signal(signal_number)
    assert read_until(process, "stopp").splitlines()[-1] == "kvsplice: stopping..."
    assert process.wait(5) == 0
    assert time.monotonic() - before < 5
    assert not is_running(worker)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=1)


def test_a_worker_that_dies_at_the_start_ends_it(serve):
    process = serve(BAD_WORKER)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "error: prefill-0 ended with exit code 9 before it was ready; its last lines:\n  out of memory" in output
    assert "ready at" not in output


def test_a_worker_that_refuses_its_settings_ends_it_with_its_line(serve):
    process = serve('print("loading"); print("kvsplice prefill: error: --x is too much"); raise SystemExit(2)')
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 2
    assert output.splitlines()[-1] == "kvsplice serve: error: --x is too much"


def test_children_die_with_a_killed_launcher(serve):
    process = serve(GOOD_WORKER)
    worker = int(re.search(r"pid (\d+)", read_until(process, "| pid"))[1])
    process.kill()
    wait_for(lambda: not is_running(worker), 5)


def test_port_in_use_is_one_line_and_exit_code_2(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--port", str(port), "--device", "cpu"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvsplice serve: error: cannot listen on 127.0.0.1 port {port}: Address already in use")
    assert error.count("\n") == 1


def test_usable_port():
    assert 0 < usable_port("127.0.0.1", 0) < 65536
    with pytest.raises(PortUnavailableError, match=r"cannot listen on no-such-host\.invalid"):
        usable_port("no-such-host.invalid", 1)


def test_dial_host():
    assert dial_host("0.0.0.0") == "127.0.0.1"
    assert dial_host("::") == "::1"
    assert dial_host("10.0.0.1") == "10.0.0.1"


def test_the_curl_line_is_one_shell_command(tmp_path):
    probe = GatewayProbe("127.0.0.1", 8000, 'it\'s "mine"', "secret", chat=False)
    script = f'curl() {{ printf "%s\\n" "$@"; }}; KVSPLICE_API_KEY=k; {probe.curl_line}'
    words = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[:2] == ["-N", "http://127.0.0.1:8000/v1/completions"]
    assert "Authorization: Bearer k" in words
    assert json.loads(words[-1])["model"] == 'it\'s "mine"'


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"tokenizer_config.json": "{}"}, False),
        ({"tokenizer_config.json": '{"chat_template": "x"}'}, True),
        ({"chat_template.jinja": "x"}, True),
    ],
)
def test_a_model_with_a_chat_template_is_asked_a_question(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert has_chat_template(tmp_path) is expected
    probe = GatewayProbe("::1", 8000, "tiny", None, chat=expected)
    assert probe.curl_line.startswith(f"curl -N http://[::1]:8000/v1/{'chat/' if expected else ''}completions -H ")
    assert ('"messages"' in probe.curl_line) is expected


def test_probe_without_a_gateway():
    probe = GatewayProbe("127.0.0.1", usable_port("127.0.0.1", 0), "tiny", None, chat=False)
    healthy, reason = probe.health()
    assert (healthy, "the gateway does not answer" in reason) == (False, True)
    with pytest.raises(LaunchError, match="refused"):
        list(probe.sample())


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (0, 2), (2, 3)])
def test_ready_means_that_all_workers_are_there(prefill, decode, tmp_path):
    """The gateway is content with one worker of each role, while others might still be loading."""
    machine = Machine(cores=(0,), gpus=(), http_port=8123, control_port=9123)
    config = ServeConfig(prefill=prefill, decode=decode)
    workers = _probe(config, machine, tmp_path, plan(config, tmp_path, machine, {})).workers
    assert workers == (*(f"prefill-{i}" for i in range(prefill)), *(f"decode-{i}" for i in range(decode)))


def test_not_ready_while_a_worker_of_several_is_missing_or_takes_nothing(fake_gateway):
    port = fake_gateway()
    probe = GatewayProbe("127.0.0.1", port, "tiny", None, chat=False, workers=("prefill-0", "prefill-1"))
    for words in ("no decode worker", "gives prefill-0 no requests", "does not know prefill-1"):
        wait_for(lambda words=words: words in probe.health()[1])
    assert not probe.health()[0]
    assert replace(probe, workers=("prefill-0",)).health() == (True, "ready")


def test_sample_error_is_told(fake_gateway):
    probe = GatewayProbe("127.0.0.1", fake_gateway(), "other", None, chat=False)
    wait_for(lambda: "no decode worker" in probe.health()[1])
    with pytest.raises(LaunchError, match="HTTP 404: no such model"):
        list(probe.sample())


def test_texts_of_events():
    assert list(_texts(b'data: {"choices": [{"delta": {"role": "assistant"}}, {"delta": {"content": "a"}}]}\n')) == [
        "",
        "a",
    ]
    assert list(_texts(b'data: {"choices": []}\n')) == []
    assert list(_texts(b"data: [DONE]\n")) == []
    with pytest.raises(LaunchError, match="worker lost"):
        list(_texts(b'data: {"error": {"message": "worker lost"}}\n'))
