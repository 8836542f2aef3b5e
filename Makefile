# Each target makes what it needs. Python: any 3.11 or newer as `python3`, or PYTHON=...
PYTHON ?= python3
BIN := .venv/bin
# evaluated where it is used, once torch is there: AMD's GPUs count if that torch can use them
HAS_GPUS = nvidia-smi -L >/dev/null 2>&1 || $(BIN)/python -c 'import torch; torch.cuda.init()' 2>/dev/null
DEVICES = $(shell $(HAS_GPUS) && echo auto || echo cpu:2)

# .venv is made by a Python that is new enough, or not at all
FIT = import sys; v = sys.version_info; sys.exit(v < (3, 11) and "error: %s is Python %d.%d; Samecurve \
needs 3.11 or newer" % (sys.argv[1], v[0], v[1]) or 0)
AGAIN = make $(or $(MAKECMDGOALS),demo) PYTHON=python3.11
VENV = @if test -x $(BIN)/python; then \
	  $(BIN)/python -c '$(FIT)' $(BIN)/python || { echo '  remedy: rm -rf .venv; $(AGAIN)' >&2; exit 1; }; \
	else \
	  { command -v $(PYTHON) >/dev/null || { echo 'error: there is no $(PYTHON)' >&2; false; }; } && \
	  $(PYTHON) -c '$(FIT)' $(PYTHON) || \
	    { echo '  remedy: install Python 3.11 or newer; $(AGAIN)' >&2; exit 1; }; \
	  $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }; \
	fi

.PHONY: demo test test-long test-kernel chaos lint emulator bench docs dist dist-check clean

.venv/.run: pyproject.toml constraints.txt
	$(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

.venv/.test: pyproject.toml constraints.txt
	$(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps timm  # its torchvision has to fit torch
	touch $@ .venv/.run

demo: .venv/.run
	$(BIN)/samecurve train -f models/tiny.yaml --devices $(DEVICES)

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy || { [ $$? = 2 ] && $(BIN)/mypy --num-workers 0; }  # a worker has 3 s to start: busy machines
	$(BIN)/lint-imports

test test-long test-kernel: export PYTHONDONTWRITEBYTECODE :=  # some hundred processes import the program: compile it once

emulator: .venv/.test  # compiled before the tests: on a busy machine that takes longer than a test may
	$(BIN)/python -P -m samecurve_products.rehearse.emulated_cuda.build

test: lint emulator
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=30

test-long: lint emulator  # hours; TESTS=tests/launch: of one room
	$(BIN)/python -m pytest -m long -n 2 --dist worksteal --timeout 3600 --durations=30 $(TESTS)

# the tests of each product (samecurve_products/), for make test-PRODUCT; the rest is the kernel's
EXPERIMENTS = tests/experiments/test_
OF_page = tests/ui tests/tasks/test_data_show.py tests/cli/test_block_text.py
OF_report = tests/report tests/test_results.py
OF_init = tests/interview
OF_convert = tests/convert tests/compat
OF_submit = tests/submit
OF_rehearse = tests/rehearse
OF_trackers = $(wildcard tests/observe/test_*trackers.py) tests/observe/test_kubeflow.py
OF_doctor = $(wildcard $(EXPERIMENTS)check_*.py)
OF_lab = $(addsuffix .py,$(addprefix $(EXPERIMENTS),audit bench suite machine)) tests/core/test_simulation.py
OF_text = $(wildcard tests/tasks/test_huggingface*.py tests/tasks/test_language*.py) tests/tasks/lora \
	tests/tasks/test_chat_templates.py tests/tasks/test_conversations.py tests/tasks/test_stretching.py
OF_pictures = tests/tasks/diffusion tests/tasks/vision $(wildcard tests/tasks/test_vision*.py)
OF_sensors = $(wildcard tests/tasks/test_timeseries*.py)
PRODUCTS = page report init convert submit rehearse trackers doctor lab text pictures sensors
PAGES = tests/test_pages.py tests/test_pages_run.py tests/test_site.py tests/test_recipes.py

test-kernel: .venv/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal $(addprefix --ignore=,$(PAGES) $(foreach product,$(PRODUCTS),$(OF_$(product))))

$(addprefix test-,$(PRODUCTS)): test-%: .venv/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal $(OF_$*)

chaos: .venv/.test  # the fault campaign alone; it writes benchmarks/results/chaos-MACHINE.json
	PYTHONPATH=$(CURDIR)/src:$(CURDIR):$(CURDIR)/tests $(BIN)/python tests/campaign/chaos.py $(if $(SEED),--seed $(SEED))

.venv/.bench: pyproject.toml constraints.txt
	$(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,bench]'
	touch $@ .venv/.test .venv/.run

bench: .venv/.bench
	$(BIN)/python -m benchmarks.curves
	$(BIN)/python -m benchmarks.noise_seeding
	$(BIN)/python -m benchmarks.same_batch
	$(BIN)/python -m benchmarks.hf
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.ddp
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.page
	$(BIN)/python -m benchmarks.same_batch_page

.venv/.docs: .venv/.test
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

docs: .venv/.docs  # the schema and the tables in docs/ that are made from the code; then site/
	PYTHONPATH=src $(BIN)/python tests/generated_docs.py
	rm -rf site
	$(BIN)/python -m sphinx -W --keep-going -q -b html -c docs/site . site

.venv/.release: pyproject.toml constraints.txt
	$(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt 'build>=1.2'
	touch $@

dist: .venv/.release  # a wheel and an sdist, and what is in them
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python tests/distributions.py dist

# the wheel in a new environment, outside of the repository
dist-check: DIST_PYTHON ?= $(BIN)/python
dist-check:
	$(DIST_PYTHON) tests/wheel_trial.py dist/*.whl

clean:
	rm -rf .venv runs dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -exec rm -rf {} +
