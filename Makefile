# `make test` on a fresh machine sets everything up first.
PYTHON_PACKAGES = comm_core overlap dear wfbp
CPP = $(shell find comm_core -name '*.hpp' -o -name '*.cpp')
BIN = .venv/bin

.PHONY: help setup test test-1 test-2 test-4 lint format ci clean
help: ## show the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: ## make .venv ready (under a second when it is)
	@bash scripts/setup.sh

test: setup ## run all tests
	@$(BIN)/python -m pytest tests

test-1 test-2 test-4: setup ## only the suites that run inside every rank, at that many ranks over MPI
	@$(BIN)/python -m pytest tests/test_spmd.py -k "mpi-$(@:test-%=%)"

lint: setup ## ruff, mypy, clang-format, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PYTHON_PACKAGES)
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: setup ## format Python and C++
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

ci: lint test ## what must be green

clean: ## remove what setup made
	rm -rf .venv build
