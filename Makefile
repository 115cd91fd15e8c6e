# `make demo` and `make test` need nothing but a Python (3.10 or newer) with pip: they make their own environment.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
METADATA := pyproject.toml setup.cfg constraints.txt

.PHONY: demo test test-all quality

demo: $(VENV)/.installed-base
	$(BIN)/hf-treespec demo

test: $(VENV)/.installed-test
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-all: $(VENV)/.installed-test
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 -m "not gpu"

quality: $(VENV)/.installed-quality
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Some distributions ship `venv` without the pip that it would copy; then the pip of $(PYTHON) installs one.
$(BIN)/python:
	@$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

# Files that say what is installed; made anew when the package's metadata changes.
$(VENV)/.installed-base: $(METADATA) | $(BIN)/python
	@echo "Installing hf-treespec into $(VENV) (the first time this takes minutes: torch is large) ..."
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-test: $(METADATA) | $(BIN)/python
	@echo "Installing hf-treespec[test] into $(VENV) (the first time this takes minutes: torch is large) ..."
	@$(PIP_INSTALL) --editable ".[test]"
	@touch $@

# Ruff alone: linting needs no torch.
$(VENV)/.installed-quality: $(METADATA) | $(BIN)/python
	@$(PIP_INSTALL) "ruff>=0.9"
	@touch $@
