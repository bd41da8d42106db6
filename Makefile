# `make test` on a fresh machine sets everything up first.
PYTHON_PACKAGES = comm_core overlap dearrun dear wfbp mgwfbp bytescheduler_adapter oss fsdp osdp co2 pipe model_parallel bench
CPP = $(shell find comm_core -name '*.hpp' -o -name '*.cpp')
BIN = .venv/bin

.PHONY: docs docs-serve help setup setup-tests build test test-all test-newest test-rest test-beside mutations test-1 test-2 test-4 test-slow sanitize wheel lint format ci bench horovod compare-horovod claims clean
help: ## show the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: ## make .venv ready (under a second when it is)
	@bash scripts/setup.sh

setup-tests:
	@bash scripts/setup.sh tests

build: setup ## the same: setup builds comm_core when its sources changed

PYTEST = $(BIN)/python -m pytest tests -n 3 --dist worksteal

test: setup-tests ## run the fast tier, ten minutes on two fast idle cores: every promise, for three strategies
	@DEAR_TESTS=fast $(PYTEST)

test-all: setup-tests ## run all tests: every strategy by every model, option and number of ranks; then test-newest
	@$(PYTEST)
	@[ -n "$$INSTEAD" ] || bash scripts/newest.sh

test-newest: ## the fast tier with the newest torch there is, in a checkout of its own (build/newest)
	@bash scripts/newest.sh

test-rest: setup-tests ## what test-all has and test has not
	@DEAR_TESTS=rest $(PYTEST)

test-beside: setup-tests ## of that, the second tier, before a release: each case at one, two or four ranks, or over gloo
	@DEAR_TESTS=beside $(PYTEST)

mutations: setup-tests ## break promises, one after the other; each has a test that fails then (minutes)
	@$(BIN)/python -m tests.mutations

test-1 test-2 test-4: setup-tests ## only the suites that run inside every rank, at that many ranks over MPI
	@$(BIN)/python -m pytest tests/test_spmd.py -k "mpi-$(@:test-%=%)"

test-slow: setup-tests ## only the tests that are too slow for every run, at all numbers of ranks (needs several GB)
	@DEAR_SLOW_TESTS=only $(BIN)/python -m pytest tests -k "not communicator-torchrun"

sanitize: setup ## build comm_core with kind=address, undefined or thread, and run its tests so (minutes)
	@bash scripts/sanitize.sh $(or $(kind),address)

wheel: ## dist/*.whl, for this Python, without MPI: whoever installs it needs no compiler
	@bash scripts/wheel.sh

lint: setup ## ruff, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PYTHON_PACKAGES) benchmarks.py tests/compare_horovod tests/forkserver tests/mutations tests/tiers.py
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: setup ## format Python and C++
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

ci: lint test ## what a change waits for

docs: .venv-docs/ready ## build the documentation site into build/site; a broken link or reference fails
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

docs-serve: .venv-docs/ready ## show the site on this machine while pages change
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve

.venv-docs/ready: requirements-docs.txt
	@python3 -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet -r requirements-docs.txt
	@touch $@

bench: setup ## time every collective, at 2 ranks on this machine, and what ranks compute in them
	$(BIN)/python -m bench.collectives
	$(BIN)/python -m bench.kernels

horovod: setup ## build Horovod 0.28.1, a baseline of the benchmarks (minutes; optional)
	@bash scripts/horovod.sh

compare-horovod: setup ## run the same calls and scripts under Horovod and ours (minutes; `make horovod` first)
	@$(BIN)/python -m tests.compare_horovod $(if $(package),--package $(package))

claims: setup ## measure again what the pages claim (hours, as root); list=1 shows it, only=README.md:110 is one of them
	@$(BIN)/python -m bench.claims.repeat $(if $(list),--list) $(if $(only),--only "$(only)") $(if $(repeats),--repeats $(repeats)) \
		$(if $(busy),--busy)

clean: ## remove what setup made
	rm -rf .venv .venv-docs build dist .pytest_cache .mypy_cache .ruff_cache
