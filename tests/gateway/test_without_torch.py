"""The gateway runs where torch is not installed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
from importlib.machinery import PathFinder


class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("torch is not hidden")

from tests.gateway.http_world import make_world

answer = make_world().chat().json()
assert answer["choices"][0]["message"]["content"] == "hello world", answer
assert "torch" not in sys.modules
"""


def test_a_chat_is_answered_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
