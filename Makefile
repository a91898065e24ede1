# Every target first brings .venv up to date (.ci/venv.py says how); that takes no time when it is.
# Variables:  PYTHON=python3.11  TORCH_VERSION=2.13.0  TORCH_INDEX_URL=URL  TORCH=cuda  SEEDS=100
#             SERVERS=auto  REQUIRE=redis,postgresql,mysql,etcd  PROCESSES=2
#             NODES="8 64 256"  BACKENDS="redis c10d"  ROUNDS=3  BENCH="--limit 120 --plot join.svg"

PYTHON ?= python3
SEEDS ?= 100
SERVERS ?= auto
REQUIRE ?=
PROCESSES ?= 2
NODES ?= 8 32 64
BACKENDS ?= redis sqlite c10d
ROUNDS ?= 3
BENCH ?=
export TORCH_VERSION TORCH_INDEX_URL TORCH

BIN := .venv/bin
# Those that can be run; the others in that folder are parts of them.
BENCHMARKS := $(sort $(shell grep -l '^if __name__ ==' benchmarks/*.py))
PROGRAMS := $(wildcard .ci/*.py examples/*.py benchmarks/*.py)
# One process for everything, so that one closing line counts everything.
PYTEST := $(BIN)/pytest --doctest-modules --pyargs rdzv ./tests --rdzv-servers=$(SERVERS) \
    $(if $(REQUIRE),--rdzv-require=$(REQUIRE))
IN_CONTAINERS := tests/integration/test_servers.py \
    $(addprefix tests/integration/test_,$(addsuffix _conformance.py,redis postgresql mysql etcd))
REPORT := build/conformance.json

.PHONY: help venv demo test test-full test-docker lint types kit-proof sim bench bench-join clean
.DEFAULT_GOAL := help

help:  ## this text
	@sed -n 's/^\([a-z-]*\):[^#]*##/  make \1\t/p' Makefile | expand -t 20
	@sed -n 's/^# Variables: /\nVariables:/p; s/^#   /   /p' Makefile

venv:  ## .venv with the package and all tools
	@command -v "$(PYTHON)" >/dev/null || { echo "No $(PYTHON) here. Install Python 3.10 or newer" \
	    "(Debian: apt install python3 python3-venv) or name one: make PYTHON=/path/to/python3" >&2; \
	    exit 1; }
	@"$(PYTHON)" .ci/venv.py

demo: venv  ## an elastic training run on SQLite: a node dies, a new one joins; 2 minutes
	@$(BIN)/python examples/demo.py

test: lint types  ## all checks and tests, about 20 minutes on 2 cores
	@echo "[sim] $(SEEDS) seeds"
	@$(BIN)/python tests/sim/run.py --seeds $(SEEDS)
	@echo "[pytest] doctests and tests/, in $(PROCESSES) processes"
	@$(PYTEST) --numprocesses=$(PROCESSES) --dist=loadfile

test-full: SEEDS := 1000
test-full: lint types  ## the same with 1,000 simulation seeds and the long tests
	@echo "[sim] $(SEEDS) seeds"
	@$(BIN)/python tests/sim/run.py --seeds $(SEEDS)
	@echo "[pytest] doctests and tests/, the long ones too"
	@$(PYTEST) --numprocesses=$(PROCESSES) --dist=loadscope -m "" --rdzv-report=$(REPORT)
	@$(BIN)/python .ci/matrix.py $(REPORT)

test-docker: venv  ## the conformance suites on servers in containers (needs a Docker engine)
	@echo "[pytest] servers in containers"
	@$(BIN)/pytest --rdzv-servers=docker --rdzv-require=redis,postgresql,mysql,etcd \
	    --numprocesses=$(PROCESSES) --dist=loadfile $(IN_CONTAINERS)

lint: venv  ## ruff: rules and format
	@echo "[lint] ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .

types: venv  ## mypy --strict
	@echo "[types] mypy$(if $(wildcard .mypy_cache),, (about a minute this time, since it reads torch))"
	@$(BIN)/mypy --strict -p rdzv
	@$(BIN)/mypy --strict --exclude ^tests/conformance/ tests $(PROGRAMS)
	@cd examples/third_party_backend && ../../$(BIN)/mypy --strict \
	    --cache-dir ../../.mypy_cache/third_party http_rdzv tests train.py

kit-proof: venv  ## the conformance kit catches 166 deliberately broken backends and stores
	@$(BIN)/python tests/kit/proof.py

sim: venv  ## simulation only: make sim SEEDS=1000
	@$(BIN)/python tests/sim/run.py --seeds $(SEEDS)

bench: venv  ## every program in benchmarks/
	@for program in $(or $(BENCHMARKS),$(error benchmarks/ holds no program)); do \
	    echo "[bench] $$program"; $(BIN)/python "$$program" || exit; done

bench-join: venv  ## how long NODES nodes take to meet on BACKENDS, torch's c10d beside them
	@$(BIN)/python benchmarks/join.py --nodes $(NODES) --backends $(BACKENDS) --rounds $(ROUNDS) \
	    $(BENCH)

clean:  ## remove .venv, build/ and every cache
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
