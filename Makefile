# `make help` lists the targets. PYTHON chooses the interpreter that the environment is made with.
VENV := .venv
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$name; break; }; done)
BIN := $(VENV)/bin
ANY_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
STAMP := $(VENV)/.installed
# On two cores: of five workers two or three wait for Slurm most of the time.
TEST_WORKERS ?= 5
# If it were set, each process of a test would compile hpc-train again.
unexport PYTHONDONTWRITEBYTECODE
# Fast tests start no ranks.
CHECK_WORKERS ?= 2
# Paths of sockets are limited in length: in a deep checkout use make CLUSTER=/tmp/slurm cluster.
CLUSTER ?= .cluster
# What benchmarks compare with.
PEERS := .bench/peers
# Seeds of random faults: of `make soak`, and of `make test-full`.
SEEDS ?= 1-100
FULL_SEEDS ?= 1-20
# Seeds of `make bisect-faults` and `make verify-faults`.
FAULTS ?= 1-60
# Mutants of `make mutation`.
NUM ?= 40
SEED ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-full test-slurm-new test-slurm-prefix test-image soak bisect-faults verify-faults answers reliability mutation parallelism test-gpu cluster cluster-down check build clean docs lint

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

install: $(STAMP) ## create .venv with hpc-train and the development tools

# To compile all 23,000 files takes a minute; a first import compiles those that it needs.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; run make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (PyTorch is large, the first time takes minutes)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]'
	@$(BIN)/python -c 'import torch, torchvision, timm, hpc_train.training.main'
	@touch $@

# Slurm and a browser, for the tests.
.PHONY: test-packages
test-packages:
	@tests/slurm/install.sh
	@tests/report/install.sh

# pip and apt at the same time.
INSTALL_ALL = $(MAKE) --no-print-directory -j2 install test-packages

demo: install ## train a small model on two ranks of this machine, in about a minute
	@HPC_TRAIN_RUNS=runs $(BIN)/hpc-train submit examples/digits.yaml --local --devices 2 --new device=cpu

.PHONY: test-fast coverage durations bench bench-gpu bench-peers gpu-day gpu-cluster
test-fast: install ## run the tests that start no ranks and no Slurm: under two minutes
	@$(BIN)/python -m pytest -q -n $(CHECK_WORKERS) -m "not slow and not gpu"

coverage: install ## run the fast tests; show their line and branch coverage by module
	@$(BIN)/python -m pytest -q -n $(CHECK_WORKERS) -m "not slow and not gpu" \
		--cov=hpc_train --cov-branch --cov-report=term:skip-covered

durations: ## run the tests of make test; record the time of each in tests/durations.json
	@+$(INSTALL_ALL)
	@$(BIN)/python -m tests.durations -q -n $(TEST_WORKERS) --dist worksteal -m "not soak"

# Every rank starts as it does for a user; make test forks many from a process that has imported torch.
test-full reliability: export HPC_TRAIN_TEST_FRESH_RANKS := 1

test: ## run all tests except those that take hours; as root on Debian installs Slurm by apt
	@+$(INSTALL_ALL)
	@$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m "not soak"

test-full: ## all tests with more seeds, all parallel settings, a short soak and mutation testing: hours
	@+$(INSTALL_ALL)
	@HPC_TRAIN_ALL_PARALLEL=1 HPC_TRAIN_FUZZ=3000 HPC_TRAIN_TEST_ANSWERS=3000 HPC_TRAIN_FAULT_SEEDS=$(FULL_SEEDS) $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m "soak or not soak"
	@$(BIN)/python -m tests.mutation --num $(NUM) --seed $(SEED) --slow

test-slurm-new: install ## run the Slurm tests with Debian 13's Slurm 24.11 in a chroot: half an hour; needs root
	@tests/slurm/debian13.sh $(CURDIR)/$(BIN)/python -m pytest -q -n $(CHECK_WORKERS) --dist worksteal -m slurm tests/slurm tests/docs

test-slurm-prefix: install ## SLURM_PREFIX=/opt/slurm: run the Slurm tests with the Slurm installed there: half an hour; needs root
	@tests/slurm/install.sh
	@HPC_TRAIN_REQUIRE_SLURM=1 tests/slurm/prefix.sh "$(SLURM_PREFIX)" \
		$(BIN)/python -m pytest -q -n $(CHECK_WORKERS) --dist worksteal -m slurm tests/slurm tests/docs

soak: install ## SEEDS=1-100: run on a real Slurm with random faults, under a minute per seed
	@HPC_TRAIN_REQUIRE_SLURM=1 tests/slurm/install.sh
	@$(BIN)/python -m tests.faults.soak --seeds $(SEEDS)

test-image: install ## build the image of envs/ by podman, resume a preempted run in it: needs root, Debian, PyPI and 25 GB of disk
	@HPC_TRAIN_REQUIRE_SLURM=1 tests/slurm/install.sh
	@HPC_TRAIN_REQUIRE_SLURM=1 $(BIN)/python -m pytest -q -m soak tests/slurm/test_containers.py

bisect-faults: install ## FAULTS=1-60: runs with a seeded random fault each, which bisect must name: about half an hour
	@$(BIN)/python -m tests.end_to_end.random_faults --seeds $(FAULTS)

verify-faults: install ## FAULTS=1-60: the same on a node of a real Slurm, for verify_every_steps to find: about half an hour
	@HPC_TRAIN_REQUIRE_SLURM=1 tests/slurm/install.sh
	@$(BIN)/python -m tests.end_to_end.node_faults --seeds $(FAULTS)

answers: install ## 10,000 seeded sequences of damaged answers of Slurm's programs: about 10 minutes on 2 cores
	@HPC_TRAIN_TEST_ANSWERS=10000 $(BIN)/python -m pytest -q -n $(TEST_WORKERS) tests/launchers/slurm/test_damaged_answers.py

reliability: install ## cause every fault of the catalogue and write docs/reliability.md
	@tests/slurm/install.sh
	@$(BIN)/python -m tests.faults.reliability -n $(TEST_WORKERS)

mutation: install ## NUM=40 SEED=1 PACKAGES="run recovery" NEAR=1: mutation testing: list changes of the code that no fast test detects: hours
	@$(BIN)/python -m tests.mutation --num $(NUM) --seed $(SEED) $(if $(PACKAGES),--packages $(PACKAGES)) $(if $(NEAR),--near)

parallelism: install ## train all supported combinations and write the table of docs/parallelism.md: hours
	@$(BIN)/python -m tests.parallelism.report

bench: $(PEERS)/.installed ## run all benchmarks that need no GPU and write docs/performance.md: hours; QUICK=1 only tries them
	@$(BIN)/python -m benchmarks --peers $(PEERS) $(if $(QUICK),--quick)

bench-gpu: $(PEERS)/.installed ## measure throughput and memory on one GPU: ten minutes; writes docs/performance.md
	@$(BIN)/python -m benchmarks.gpu --only speed --peers $(PEERS) $(if $(QUICK),--quick)

# Installs nothing: packages are those of .venv, of PYTHON, of PYTHONPATH, or wheels in the folder WHEELS.
gpu-day: ## all that one GPU shows in 12 minutes: whole path, probes, tests, speed, memory; WHEELS=FOLDER for packages
	@$(ANY_PYTHON) -m benchmarks.gpu $(if $(WHEELS),--wheels $(WHEELS)) $(if $(wildcard $(PEERS)),--peers $(PEERS))

gpu-cluster: ## SLURM_FILE=slurm.yaml: measure every strategy on two nodes with eight GPUs each by jobs of Slurm
	@test -n "$(SLURM_FILE)" || { echo "name a file with your slurm: section: make gpu-cluster SLURM_FILE=slurm.yaml" >&2; exit 1; }
	@$(ANY_PYTHON) -m benchmarks.gpu_cluster $(SLURM_FILE)

bench-peers: $(PEERS)/.installed ## install what benchmarks compare with into .bench/peers

# Peers must not get into the environment. timm's training script is in its repository only.
$(PEERS)/.installed: benchmarks/requirements-peers.txt | install
	@echo "installing what benchmarks compare with into $(PEERS)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(PEERS) -r $<
	@test -e $(PEERS)/timm_train.py || { rm -rf .bench/timm; GIT_TERMINAL_PROMPT=0 git clone --quiet --depth 1 \
		--branch v$$($(BIN)/python -c 'from importlib.metadata import version; print(version("timm"))') \
		https://github.com/huggingface/pytorch-image-models .bench/timm && cp .bench/timm/train.py $(PEERS)/timm_train.py; } \
		|| echo "no timm_train.py in $(PEERS): its arms will not be measured" >&2
	@touch $@

test-gpu: install ## run the tests that need a CUDA device and write benchmarks/results/gpu.json
	@$(BIN)/python -m benchmarks.gpu --only all-tests --minutes 60

cluster: install ## start a real Slurm of four nodes on this machine (root, Debian)
	@HPC_TRAIN_REQUIRE_SLURM=1 tests/slurm/install.sh
	@$(BIN)/python -m tests.slurm.cluster up $(CLUSTER)

cluster-down: ## stop that Slurm and its jobs
	@test ! -d $(CLUSTER) || $(BIN)/python -m tests.slurm.cluster down $(CLUSTER)

lint: install ## run ruff, mypy and import-linter; count the package's phrases (tests/language.py)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tests.language

check: lint ## lint and the fast tests: a few minutes
	@$(BIN)/python -m pytest -q -n $(CHECK_WORKERS) -m "not slow and not gpu"

docs: install ## build the documentation site in build/docs; any warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

build: install ## build sdist and wheel into dist/
	@$(BIN)/python -m build --no-isolation

clean: ## remove the environment, build outputs and caches; keeps runs and data
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
