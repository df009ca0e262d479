"""Our package `kernels` has the import name of a PyPI package that transformers probes for.

That is harmless as long as transformers goes by the installed distribution and our package gives it nothing to
mistake for the other one. Each condition has a test, so that an upgrade which breaks one is noticed here.
"""

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

import kernels

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVING = ("engine", "gateway", "prefill", "decode", "kvtransfer", "kernels", "launcher")
MAY_TAKE = {"AutoConfig", "AutoTokenizer", "PreTrainedTokenizerBase", "PreTrainedConfig", "PretrainedConfig"}
"""Configs and tokenizers; models of transformers are for tests and for the one conversion."""
CONVERSION = ROOT / "launcher" / "conversion.py"


def requirements():
    optional = PROJECT["optional-dependencies"].values()
    return [Requirement(line) for group in (PROJECT["dependencies"], *optional) for line in group]


def test_our_package_is_the_one_that_is_imported_and_empty():
    assert Path(kernels.__file__) == ROOT / "kernels" / "__init__.py"
    assert (ROOT / "kernels" / "__init__.py").read_bytes() == b""
    assert not hasattr(kernels, "__version__")


def test_the_other_package_is_not_installed_or_asked_for():
    assert "kernels" not in {requirement.name for requirement in requirements()}
    assert "kernels" not in {name.lower() for name in importlib.metadata.packages_distributions().get("kernels", [])}


def test_transformers_floor_and_no_extras():
    """5.13 is the oldest release known to go along; the extras `kernels`, `integrations`, `all` bring the other one."""
    wanted = [requirement for requirement in requirements() if requirement.name == "transformers"]
    assert len(wanted) == 2
    for requirement in wanted:
        assert requirement.extras == set()
        assert requirement.specifier.contains("5.13")
        assert not requirement.specifier.contains("5.12.99")


def test_our_version_is_outside_of_the_other_packages_range():
    assert Version("0.1") <= Version(PROJECT["version"]) < Version("0.2")


def taken_from_transformers(path):
    """Names that a file imports from transformers; `import transformers` counts as all of it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "transformers"}
    return names


def test_serving_code_takes_only_configs_and_tokenizers():
    files = [path for package in SERVING for path in (ROOT / package).rglob("*.py") if path != CONVERSION]
    wrong = {path.relative_to(ROOT).as_posix(): taken_from_transformers(path) - MAY_TAKE for path in files}
    assert {name: taken for name, taken in wrong.items() if taken} == {}
    assert taken_from_transformers(CONVERSION) == {"AutoModelForCausalLM", "AutoTokenizer", "GgufConfig"}


PROBE = """
import kernels
from transformers.utils import import_utils
print(import_utils.is_kernels_available())
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=1))
print(type(model.model.norm).__module__)
"""


def test_transformers_does_not_mistake_ours_for_the_other_one():
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["False", "transformers.models.llama.modeling_llama"]
