"""The documents say what is true of the code where a machine can tell."""

import re
import subprocess
from pathlib import Path

import pytest

from launcher.flags import markdown_table

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def test_the_flag_table_is_what_the_code_says():
    table = re.search(r"<!-- flags -->\n(.*)<!-- /flags -->\n", README, re.DOTALL)
    assert table is not None
    assert table[1] == markdown_table(), "run `kvsplice flags` and put its output into README.md"


@pytest.mark.parametrize("text", [README, ARCHITECTURE], ids=["README", "ARCHITECTURE"])
def test_named_files_exist(text):
    named = set(re.findall(r"`([\w./-]+\.(?:py|yaml|md|toml)|tests/\w*|Dockerfile|Makefile)`", text))
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_file_map_is_long_enough_to_be_one():
    assert len(set(re.findall(r"`\w+/\w+\.py`", ARCHITECTURE))) >= 30


def test_make_targets_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"serve", "test", "check"} <= named <= targets


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [(["soak"], 600), (["soak", "SECONDS=5"], 5), (["simulate"], 60), (["simulate", "SECONDS=7"], 7)],
)
def test_make_goes_on_for_as_long_as_its_help_says(arguments, seconds):
    printed = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f" --seconds {seconds} " in printed
