# `make demo` and `make test` set up everything they need in .venv. A GPU user changes nothing: the pinned torch is a
# CUDA build on Linux where no CPU build is offered. To take another one: make setup TORCH='torch==2.9.1'
# (the stamp carries the name, so that the choice is followed although nothing else has changed)

PYTHON ?= python3
TORCH ?= $(shell grep '^torch==' constraints.txt)
VENV := .venv
SPACE := $(subst ,, )
READY := $(VENV)/ready-$(subst /,-,$(subst $(SPACE),-,$(TORCH)))
RUN := $(VENV)/bin/python
MODEL := data/models/smollm2-135m-gguf/SmolLM2-135M-Instruct.Q4_1.gguf
TOKENS ?= 48
LIMIT ?= null

.PHONY: setup demo test lint acceptance bench gpu-check clean figures experiments

setup: $(READY) $(MODEL)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(RUN) -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	rm -f $(VENV)/ready*
	touch $@

$(MODEL): | $(READY)
	$(RUN) -m clasp_core.fetch smollm2-135m

demo: setup  ## AR and CLaSp on the sample set, about three minutes on two cores
	$(RUN) run.py method=clasp model=smollm2-135m-deep 'task=[sample]' limit=$(LIMIT) generation.max_new_tokens=$(TOKENS)

test: setup
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

acceptance: setup  ## the points that need real models or minutes, one line each
	$(RUN) -m tests.acceptance $(POINTS)

bench: setup  ## single passes beside the machine's limits, and every method's time and memory; rows for `make figures`
	$(RUN) -m tests.acceptance.speed $(MODELS)

gpu-check: setup  ## what passes cost on a GPU, with random models of LLaMA-3's shapes
	$(RUN) -m tests.acceptance.gpu $(MODELS)

clean:
	rm -rf $(VENV)

EXPERIMENTS := table1 fig3a fig3b fig4a fig4b fig4c fig5

figures: setup  ## every figure, table, notebook and the README's table again, from the rows below results/
	$(RUN) -m clasp_core.report regenerate results

experiments: setup  ## all that `make figures` draws: experiments, README's run, passes; under an hour on two cores
	for experiment in $(EXPERIMENTS); do $(RUN) run.py experiment=laptop/$$experiment || exit 1; done
	$(MAKE) demo TOKENS=64
	$(MAKE) bench
