"""`python -m tests.soak --seconds 600`: a soak, its account as a table and, with --json, in a file. Exit code 1 unless
every answer was right or an error, and no block was leaked."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.run import soak
from tests.tiny_models import save_tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Random load beside random faults.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long [default: 600]")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="draws load and faults [default: the time]")
    parser.add_argument("--json", type=Path, help="write the account here, too")
    asked = parser.parse_args()
    print(f"seed {asked.seed}, {asked.seconds:g} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model("smollm2", Path(folder) / "model", max_position_embeddings=16384)
        account = soak(model, Path(folder), asked.seconds, asked.seed)
    if asked.json is not None:
        asked.json.write_text(account.as_json() + "\n")
    print(account.as_table())
    for text, count in account.errors.items():
        print(f"{count} x {text}")
    failures = account.requests["wrong"] + account.requests["hung"] + account.leaked_blocks
    print("\n".join(account.wrong))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
