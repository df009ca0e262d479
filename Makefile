# `make serve` and `make test` are all that a new checkout needs: Python 3.11 or newer, and make.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
# Extra flags for `make serve` and `make test`, as in: make serve ARGS='--port 9000'
ARGS ?=
# The server that `make bench-mixed` and `make bench-handoff` measure.
URL ?= http://127.0.0.1:8000

.DEFAULT_GOAL := help
.PHONY: help serve test simulate check kernels-aot bench-step bench-mixed bench-handoff bench-transfer bench-sharing faults fuzz soak venv fetch-model clean bench-kernels

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 24

serve: $(INSTALLED)  ## Start everything on this machine; Ctrl-C stops it
	@exec $(VENV)/bin/kvsplice serve $(ARGS)

test: $(INSTALLED) fetch-model  ## Run the whole suite; needs no GPU
	$(VENV)/bin/pytest $(ARGS)

simulate: $(INSTALLED)  ## Run the whole cluster in simulated time with fresh seeds, faults and all
	$(VENV)/bin/python -m tests.simulation --seconds $(or $(SECONDS),60) $(ARGS)

check: $(INSTALLED)  ## Lint, format, types, import rules
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest -q tests/test_imports.py tests/test_kernels_name.py

kernels-aot: $(INSTALLED)  ## Compile the GPU kernels for four architectures and check their machine code; needs no GPU
	$(VENV)/bin/python -m kernels.triton_backend.aot $(ARGS)

bench-step: $(INSTALLED) fetch-model  ## Time engine steps on this CPU against transformers and the machine's limits
	$(VENV)/bin/python -m experiments.bench_step $(ARGS)

bench-mixed: $(INSTALLED)  ## Time streams with and without long prompts: make bench-mixed URL=http://127.0.0.1:8000
	$(VENV)/bin/python -m experiments.mixed_load --url $(URL) $(ARGS)

bench-handoff: $(INSTALLED)  ## Time the hand-over of a request that is alone: make bench-handoff URL=http://127.0.0.1:8000
	$(VENV)/bin/python -m experiments.handoff --url $(URL) $(ARGS)

bench-transfer: $(INSTALLED)  ## Time the KV transfer over loopback against bare sockets
	$(VENV)/bin/python -m experiments.transfer_bench $(ARGS)

bench-sharing: $(INSTALLED) fetch-model  ## Time what a cached prefix and several choices of one prompt save
	$(VENV)/bin/python -m experiments.bench_sharing $(ARGS)

bench-kernels: $(INSTALLED)  ## Time each kernel on a GPU against its floor; ARGS='--device cpu' for the CPU's kernels
	$(VENV)/bin/python -m experiments.kernel_bench $(ARGS)

faults: $(INSTALLED)  ## Break each process at each moment of a request's life; prints the table of docs/faults.md
	$(VENV)/bin/python -m tests.e2e.faults_table $(ARGS)

fuzz: $(INSTALLED)  ## Look for messages that break something: other ones in each run; FUZZ_EXAMPLES=... a test
	FUZZ_EXAMPLES=$(or $(FUZZ_EXAMPLES),3000) $(VENV)/bin/pytest -q tests/fuzz $(ARGS)

soak: $(INSTALLED)  ## Random load beside random deaths for SECONDS=600; counts errors, wrong tokens and leaked blocks
	$(VENV)/bin/python -m tests.soak --seconds $(or $(SECONDS),600) $(ARGS)

venv: $(INSTALLED)  ## Make .venv with pinned dependencies

fetch-model: $(INSTALLED)  ## Download and convert the default model, once
	@$(VENV)/bin/kvsplice fetch-model

clean:  ## Remove .venv and all caches of the tools; the model stays in the user's cache folder
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, so that a CPU build which pip is configured to find can serve. A half-made
# environment is made anew; the marker is written last.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "kvsplice needs Python 3.11 or newer, and $(PYTHON) is not. Try: make PYTHON=python3.12" >&2; exit 1; }
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[gateway,worker,convert,dev]'
	@touch $@
