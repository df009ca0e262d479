"""The health command's verdicts, against a small HTTP server."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from launcher.cli import main
from launcher.health import ask

METRICS = b"""# HELP kvsplice:worker_capable 1 if it takes requests.
kvsplice:kv_blocks{role="decode",worker="stalled"} 1.0
kvsplice:worker_capable{role="prefill",worker="prefill-0"} 1.0
kvsplice:worker_capable{role="decode",worker="decode-0"} 1.0
kvsplice:worker_capable{role="decode",worker="stalled"} 0.0
"""


@pytest.fixture
def gateway():
    """(url, answers): path -> (status, body), to be set by the test."""
    answers = {"/health": (200, b'{"status":"ready"}'), "/metrics": (200, METRICS)}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answers[self.path]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", answers
        server.shutdown()
        thread.join()


def test_ready(gateway):
    assert ask(gateway[0], None) == (True, '{"status":"ready"}')


def test_not_ready_says_why(gateway):
    url, answers = gateway
    answers["/health"] = (503, b"no decode worker")
    assert ask(url, None) == (False, "HTTP 503: no decode worker")


@pytest.mark.parametrize(
    ("worker", "healthy", "words"),
    [
        ("prefill-0", True, "counts on"),
        ("decode-0", True, "counts on"),
        ("stalled", False, "gives stalled no requests"),
        ("decode-1", False, "does not know"),
        ("decode.0", False, "does not know"),
    ],
)
def test_worker(gateway, worker, healthy, words):
    verdict, reason = ask(gateway[0], worker)
    assert verdict is healthy
    assert words in reason


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://gateway", "gateway:8000", "http://", "http://g:x", ""])
def test_only_http_is_asked(url, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["health", f"--url={url}"])
    assert caught.value.code == 2
    assert "--url" in capsys.readouterr().err


def test_a_proxy_of_the_environment_is_not_asked(gateway, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert ask(gateway[0], None)[0]


def test_nobody_there():
    healthy, reason = ask("http://127.0.0.1:1", None)
    assert not healthy
    assert "does not answer" in reason


def test_exit_codes(gateway, capsys):
    assert main(["health", f"--url={gateway[0]}", "--worker-id=decode-0"]) == 0
    assert main(["health", f"--url={gateway[0]}", "--worker-id=decode-9"]) == 1
    assert capsys.readouterr().out == "the gateway counts on decode-0\nthe gateway does not know decode-9\n"
