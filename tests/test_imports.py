"""Who may import whom: read from the source, also imports inside of functions.

launcher, experiments           sit on top
gateway   prefill   decode      roles: never each other; the gateway never torch
             engine             what both workers share, and what runs without a cluster
         grammar                what workers and gateway share
    kvtransfer    kernels       import none of ours
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "kvtransfer", "grammar", "engine", "prefill", "decode", "gateway", "launcher", "experiments")

ALLOWED = {
    "kernels": (),
    "kvtransfer": (),
    # Gateway and workers share it, so it knows nothing of either.
    "grammar": ("kvtransfer.request_parts",),
    # Not the sockets and not the hand-over: an engine runs without a cluster.
    "engine": (
        "grammar",
        "kernels",
        "kvtransfer.addresses",
        "kvtransfer.codec",
        "kvtransfer.command_line",
        "kvtransfer.errors",
        "kvtransfer.faults",
        "kvtransfer.messages",
        "kvtransfer.request_parts",
        "kvtransfer.settings",
        "kvtransfer.worker_facts",
    ),
    "prefill": ("engine", "kvtransfer"),
    "decode": ("engine", "kvtransfer"),
    # The pure steps from tokens to text, and what may be asked: one process without a gateway needs them as well.
    "gateway": ("engine.detokenizer", "engine.sampling_bounds", "engine.shown_text", "grammar", "kvtransfer"),
    "launcher": ("gateway", "prefill", "decode", "engine", "kvtransfer"),
    "experiments": ("launcher", "gateway", "prefill", "decode", "engine", "grammar", "kvtransfer", "kernels"),
}
ENTRY_POINTS_MAY = ("launcher.default_model",)
"""`python -m ROLE` and `engine.offline` take a model's name, so the entry points (and only they) ask where it is."""

SOCKET_FILES = {
    "experiments/bare_ends.py",
    *(f"kvtransfer/{name}.py" for name in ("channel", "curve", "kv_channel", "line", "sockets", "zap")),
}
PURE_FILES = (
    "engine/block_moves.py",
    "engine/block_pool.py",
    "engine/chunk_budget.py",
    "engine/swap_space.py",
    "engine/prefix_hash.py",
    "engine/request.py",
    "engine/growing_book.py",
    "engine/request_blocks.py",
    "engine/request_book.py",
    "engine/queue_rules.py",
    "kvtransfer/complaints.py",
    "kvtransfer/gateway_link.py",
    "kvtransfer/handshakes.py",
    "kvtransfer/incoming.py",
    "kvtransfer/line_budget.py",
    "kvtransfer/link_name.py",
    "kvtransfer/checksum.py",
    "kvtransfer/emulated_link.py",
    "kvtransfer/unsaid.py",
    "kvtransfer/frames.py",
    "kvtransfer/intake.py",
    "kvtransfer/outgoing.py",
    "kvtransfer/parcels.py",
    "kvtransfer/peers.py",
    "kvtransfer/receive_commands.py",
    "kvtransfer/receive_machine.py",
    "kvtransfer/reception_ends.py",
    "kvtransfer/send_commands.py",
    "kvtransfer/send_machine.py",
    "kvtransfer/stream.py",
    "kvtransfer/targets.py",
    "kvtransfer/worker_lines.py",
    "engine/stopping.py",
    "engine/detokenizer.py",
    "engine/stops.py",
    "engine/shown_text.py",
    "engine/local_scheduler.py",
    "engine/offline_output.py",
    "engine/offline_sampling.py",
    "engine/sampling_bounds.py",
    "experiments/handoff_summary.py",
    "experiments/kernel_work.py",
    "engine/admission.py",
    "prefill/scheduler.py",
    "decode/scheduler.py",
    "gateway/beam_search.py",
    "gateway/cluster.py",
    "gateway/failover.py",
    "gateway/held_prefixes.py",
    "gateway/merge.py",
    "gateway/modes.py",
    "gateway/ranking.py",
    "gateway/reactions.py",
    "gateway/retired.py",
    "gateway/router.py",
    "gateway/structured.py",
    "gateway/worker_outlet.py",
    "grammar/compiler.py",
    "grammar/source.py",
    "experiments/mixed_summary.py",
    "experiments/mixed_tables.py",
    "experiments/percentiles.py",
    "experiments/sharing_summary.py",
    "experiments/stream_record.py",
    "experiments/transfer_report.py",
)
"""Schedulers, allocators and state machines: time and messages come in as arguments."""
IMPURE = ("torch", "zmq", "time", "datetime", "socket", "asyncio", "threading")


def source_files(package):
    return sorted((ROOT / package).rglob("*.py"))


def relative(path):
    return path.relative_to(ROOT).as_posix()


def is_entry_point(path):
    return path.name == "__main__.py" or relative(path) == "engine/offline.py"


def imports_of(path):
    """All dotted names that a file imports, also inside functions; `from a import b` gives a.b as well as a."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_under(name, roots):
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def is_any(names, roots):
    return any(is_under(name, roots) for name in names)


def our_imports(path):
    """Imports of our own packages as (module file exists) dotted modules."""
    found = set()
    for name in imports_of(path):
        if is_under(name, PACKAGES):
            target = ROOT / name.replace(".", "/")
            if target.is_dir() or target.with_suffix(".py").is_file():
                found.add(name)
    # `from engine import config` names both engine and engine.config: the longer one says it all
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_they_may(package):
    wrong = []
    for path in source_files(package):
        allowed = (package, *ALLOWED[package])
        if is_entry_point(path):
            allowed += ENTRY_POINTS_MAY
        wrong += [f"{relative(path)} imports {name}" for name in our_imports(path) if not is_under(name, allowed)]
    assert wrong == []


def test_nothing_below_imports_an_entry_point():
    below = [path for package in ("engine", "gateway", "prefill", "decode") for path in source_files(package)]
    assert [relative(path) for path in below if is_any(imports_of(path), ("engine.offline",))] == []


def test_no_package_is_forgotten():
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found - {"tests"} == set(PACKAGES)


def test_only_the_files_of_sockets_and_their_yardstick_know_zmq():
    files = {relative(path) for package in PACKAGES for path in source_files(package)}
    assert {name for name in files if is_any(imports_of(ROOT / name), ("zmq",))} == SOCKET_FILES


@pytest.mark.parametrize("name", PURE_FILES)
def test_schedulers_and_allocators_are_pure(name):
    impure = {found for found in imports_of(ROOT / name) if is_under(found, IMPURE)}
    assert impure == set()


def test_no_pickle():
    for package in PACKAGES:
        for path in source_files(package):
            assert not is_any(imports_of(path), ("pickle", "marshal", "shelve", "dill", "cloudpickle")), relative(path)


BLOCKED = """
import importlib, pkgutil, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "accelerate"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
import gateway
names = [module.name for module in pkgutil.iter_modules(gateway.__path__, "gateway.")]
assert len(names) >= 5, names
for name in names:
    importlib.import_module(name)
assert "torch" not in sys.modules
print("imported", len(names))
"""


def test_the_gateway_runs_where_torch_is_not_installed():
    result = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("imported ")


def test_the_rule_reader_sees_hidden_imports(tmp_path):
    source = tmp_path / "hidden.py"
    source.write_text("def f():\n    import torch.nn\n    from engine import config\n")
    assert imports_of(source) == {"torch.nn", "engine", "engine.config"}
    assert is_under("torch.nn", ("torch",))
    assert not is_under("torchvision", ("torch",))
