# Everything happens in .venv. Variables that you may want to give:
#   PYTHON    which Python makes .venv                       [python3]
#   EXTRA     what workers need here: cpu, or cu13 on a GPU  [cpu]
#   TORCH     which torch to install                         [the pin of constraints.txt]
#   PIP_ARGS  more arguments for every `pip install`
PYTHON ?= python3
EXTRA ?= cpu
TORCH_PIN := $(shell grep '^torch==' constraints.txt)
TORCH ?= $(TORCH_PIN)
PIP_ARGS ?=

# For `make run`
MODEL ?=
PORT ?= 50051
ONCE ?=
ARGS ?=
# For `make test-gpu`: a Python that has torch with CUDA and Triton, and grpcio, protobuf,
# tokenizers, safetensors and numpy
GPU_PYTHON ?= $(PYTHON)
QUESTION ?= What is the capital of France?

BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)
PINS := .venv/constraints.txt
RUN_STAMP := .venv/.run-$(EXTRA)
DEV_STAMP := .venv/.dev-$(EXTRA)
HELM_TOOLS := .venv/helm-tools
HELM_STAMP := $(HELM_TOOLS)/.complete

# Tests of one kind; ARGS may leave it none, which pytest says with exit code 5.
pytest = $(BIN)/python -m pytest -m '$(1)' $(ARGS) || [ $$? -eq 5 ]

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all test-gpu helm-test helm-tools lint type proto docs bench

help: ## show this help
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | awk -F'\t' '{printf "make %-10s %s\n", $$1, $$2}'

setup: $(DEV_STAMP) ## make .venv and install everything, tools for development included

run: $(RUN_STAMP) ## serve a model here and ask a first question [MODEL= PORT= ONCE=1 ARGS=]
	@$(BIN)/baton up --port $(PORT) $(if $(MODEL),--model '$(MODEL)') \
	  --ask '$(QUESTION)' $(if $(ONCE),--once) $(ARGS)

test: $(DEV_STAMP) $(HELM_STAMP) ## run the tests
	$(call pytest,not slow and not ucxx)
	$(call pytest,not slow and ucxx)

test-all: $(DEV_STAMP) $(HELM_STAMP) ## run the tests, the slow ones too
	$(call pytest,not ucxx)
	$(call pytest,ucxx)

test-gpu: ## check and measure the GPU path on one GPU, in under 8 minutes [GPU_PYTHON=]
	PYTHONPATH=.:proto $(GPU_PYTHON) -m bench.gpu $(ARGS)

helm-test: $(DEV_STAMP) $(HELM_STAMP) ## test the chart and the Dockerfile; needs no cluster
	$(BIN)/python -m pytest tests/helm $(ARGS)

helm-tools: $(HELM_STAMP) ## fetch the Helm versions that the chart is tested with

lint: $(DEV_STAMP) type ## check style, types, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q tests/test_repo.py

type: $(DEV_STAMP) ## check types
	$(BIN)/mypy

proto: $(DEV_STAMP) ## generate the stubs of proto/ anew
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto \
	  --python_out=proto --grpc_python_out=proto --mypy_out=proto --mypy_grpc_out=proto \
	  proto/baton/v1/*.proto

docs: $(RUN_STAMP) ## generate docs/cli.md, docs/metrics.md and the flags in the chart's schema anew
	$(BIN)/python -m client.cli_reference > docs/cli.md
	{ $(BIN)/python -m router.metrics_reference; $(BIN)/python -m worker.metrics_reference; } \
	  > docs/metrics.md
	$(BIN)/python helm/settings_schema.py

bench: $(DEV_STAMP) ## run the quick benchmarks
	$(BIN)/python -m bench.kv --quick
	$(BIN)/python -m bench.handoff --quick
	$(BIN)/python -m bench.idle
	$(BIN)/python -m bench.chaos --minutes 0.5
	$(BIN)/python -m bench.router --quick
	$(BIN)/python -m bench.index --quick
	$(BIN)/python -m bench.routing
	$(BIN)/python -m bench.autoscale

$(BIN)/python:
	@# Some systems ship Python without ensurepip; their own pip can stand in for it.
	@$(PYTHON) -m venv .venv || { \
	  $(PYTHON) -m venv --clear --without-pip .venv && \
	  $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; \
	} || { rm -rf .venv; echo "error: $(PYTHON) can make no virtual environment" >&2; exit 1; }

$(PINS): constraints.txt | $(BIN)/python
	@$(if $(filter $(TORCH_PIN),$(TORCH)),cat,grep -vE '^(torch|triton)==') constraints.txt > $@

# torch comes first and alone: what it finds installed decides nothing about its variant.
$(RUN_STAMP): pyproject.toml $(PINS) | $(BIN)/python
	@echo "Installing torch and Baton into .venv (some minutes, once)"
	$(PIP_INSTALL) '$(TORCH)'
	$(PIP_INSTALL) -c $(PINS) -e '.[$(EXTRA)]'
	@touch $@

$(HELM_STAMP): tests/helm/fetch_tools.py | $(BIN)/python
	@echo "Fetching two versions of Helm (75 MB, once)"
	@$(BIN)/python tests/helm/fetch_tools.py $(HELM_TOOLS)
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	$(PIP_INSTALL) -c $(PINS) -e '.[$(EXTRA),dev]'
	@touch $@
