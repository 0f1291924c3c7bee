# One word per verb. `make demo` and `make test` set up what they need in .venv.
PYTHON ?= python3
# The build of torch: cpu, cuda, or auto (cuda where there is an NVIDIA GPU).
TORCH ?= auto
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
WIDTHS ?=
# A deployment is a dozen Python processes. Without bytecode files each of them compiles all that it imports, which takes
# longer than the import itself, so the files are written whatever the caller's environment says.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SIDE_BY_SIDE := -p tests.support.side_by_side --workers 4 -o console_output_style=classic

.PHONY: setup demo serve test suite quick check check-types check-style docs fuzz fuzz-surface chaos hosts soak clients proto bench pictures clean help

help:
	@echo "make setup | demo | serve | test | quick | check | docs | fuzz | fuzz-surface | chaos | hosts | soak | clients | proto | bench | pictures | clean   (ARGS='...' is passed on)"
	@echo "TORCH=cpu or TORCH=cuda, at the first make: that build of torch; without it, cuda where there is an NVIDIA GPU"

$(VENV)/.node: pyproject.toml requirements.lock deploy/install.py
	$(PYTHON) deploy/install.py --venv $(VENV) --torch $(TORCH)
	@touch $@

$(VENV)/.dev: pyproject.toml requirements.lock deploy/install.py
	$(PYTHON) deploy/install.py --venv $(VENV) --torch $(TORCH) --dev
	@touch $@ $(VENV)/.node

setup: $(VENV)/.dev

demo: $(VENV)/.node
	$(BIN)/paceline demo $(ARGS)

serve: $(VENV)/.node
	$(BIN)/paceline serve $(ARGS)

# The checks run beside the first tests, which compute and watch no clock. A part of the tests follows them.
ifeq ($(ARGS),)
test: $(VENV)/.dev
	$(BIN)/paceline pull smollm2-135m-instruct
	@$(MAKE) --no-print-directory -k -j 3 check-types check-style docs suite
else
test: $(VENV)/.dev check
	$(BIN)/paceline pull smollm2-135m-instruct
	$(BIN)/python -m pytest $(ARGS)
endif

suite: $(VENV)/.dev
	$(BIN)/python -m tests.support.whole_suite

quick: $(VENV)/.dev
	$(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not real_model and not e2e and not multihost" $(ARGS)

check: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j 2 check-types check-style docs

check-types: $(VENV)/.dev
	$(BIN)/mypy

check-style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tests/support/proto_drift.py
	$(BIN)/python -m tests.support.reference_pages

# Every page is read again each time: a page that did not change may link to an anchor that is gone.
docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -q -W --keep-going -n -E -a -d build/doctrees docs build/docs
	@echo "docs: build/docs/index.html"

fuzz: $(VENV)/.dev
	PACELINE_FUZZ=10000 $(BIN)/python -m pytest tests/kv_transfer/handoff/test_handoff_fuzz.py -s -o timeout=3300 $(ARGS)

chaos: $(VENV)/.dev
	$(BIN)/python -m pytest tests/chaos -s --minutes 3 --streams 16 $(ARGS)

hosts: $(VENV)/.dev
	$(BIN)/python -m pytest tests/multihost -s --long $(ARGS)

soak: $(VENV)/.dev
	$(BIN)/python -m pytest tests/soak -s --requests 5000 $(ARGS)

fuzz-surface: $(VENV)/.dev
	PACELINE_FUZZ_SURFACE=10000 $(BIN)/python -m pytest tests/fuzz -s -o timeout=7200 $(ARGS)

# Programs have environments of their own; guidellm's holds torch.
CLIENT_PROGRAMS := guidellm==0.8.1 aiperf==0.13.0 lm-eval[api]==0.4.13 schemathesis==4.32.5
NODE_CLIENTS := ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7
CLIENTS := build/clients

clients: $(VENV)/.dev  # other people's clients against a deployment; ARGS='-k litellm'
	UV_SYSTEM_CERTS=1 $(BIN)/uv venv -q --allow-existing $(CLIENTS)
	UV_SYSTEM_CERTS=1 $(BIN)/uv pip install -q --python $(CLIENTS) -r tests/clients/requirements.txt
	-npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(CLIENTS) $(NODE_CLIENTS)
	for program in $(CLIENT_PROGRAMS); do \
	  UV_SYSTEM_CERTS=1 UV_TOOL_DIR=$(CLIENTS)/programs UV_TOOL_BIN_DIR=$(CLIENTS)/bin $(BIN)/uv tool install -q --with transformers $$program; done
	$(BIN)/paceline pull smollm2-135m-instruct
	PACELINE_COMMAND=$(abspath $(BIN)/paceline) $(CLIENTS)/bin/python -m pytest tests/clients $(ARGS)

lock: $(VENV)/.dev  # ARGS='--upgrade-package torch': newer versions of one package; without, pins stay
	UV_SYSTEM_CERTS=1 $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --all-extras --group setup --custom-compile-command 'make lock' $(ARGS) pyproject.toml -o requirements.lock

proto: $(VENV)/.dev  # stubs of proto/ and the generated pages of docs/
	$(BIN)/python tests/support/proto_drift.py --write
	$(BIN)/python -m tests.support.reference_pages --write

# PEERS=1: compare with other engines, which are put under build/peers at the first time; ARGS='...' are options of the
# first table, WIDTHS='...' those of the second. A peer that cannot be installed has rows that say so.
bench: $(VENV)/.dev
ifeq ($(PEERS),1)
	-$(BIN)/python -m benchmarks.peers.install
	$(BIN)/paceline bench peers $(ARGS)
	$(BIN)/paceline bench widths $(WIDTHS)
else
	$(BIN)/python -m benchmarks $(ARGS)
endif

pictures: $(VENV)/.dev  # of docs/pictures, from the kept results under benchmarks/results
	$(BIN)/python -m benchmarks.pictures $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
