"""A gateway for the launcher's tests: green on the third look, its worker capable on the second look at the metrics,
one canned completion.

python -m tests.launcher.fake_gateway PORT [child]        as a child it goes when its launcher goes, as ours do
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from launcher.lifeline import die_with_launcher


class Handler(BaseHTTPRequestHandler):
    looks = 0
    looks_at_metrics = 0

    def do_GET(self):
        if self.path == "/metrics":
            Handler.looks_at_metrics += 1
            capable = int(Handler.looks_at_metrics >= 2)
            self.reply(200, f'kvsplice:worker_capable{{role="prefill",worker="prefill-0"}} {capable}.0\n'.encode())
            return
        Handler.looks += 1
        self.reply(200 if Handler.looks >= 3 else 503, b"no decode worker")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] != "tiny" or self.headers["Authorization"] != "Bearer open-sesame":
            self.reply(404, b"no such model")
            return
        events = [{"choices": [{"text": text}]} for text in (" Paris", ", of", " course.")]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.reply(200, "".join([": keep-alive\n\n", *lines, "data: [DONE]\n\n"]).encode())

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    if sys.argv[2:] == ["child"]:
        die_with_launcher()
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
