# Every target builds .venv itself when it is missing, or older than the files that define it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check format docs dist bench lab figures reports reproduce faults clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "gradsieve needs Python 3.11 or newer; name one with: make PYTHON=python3.12"; exit 1; }
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY) ## two models, five methods, links of 100 Mbit/s between 4 hosts, and a report (4 minutes)
	$(BIN)/gradsieve demo

test: $(READY) ## run the tests (under 10 minutes on 2 cores)
	$(BIN)/pytest -q -n 2 --dist worksteal -m 'not slow'

test-all: $(READY) ## run the tests and the slow ones, with more generated examples
	$(BIN)/pytest -q -n 2 --dist worksteal --hypothesis-profile thorough

check: $(READY) ## lint, formatting, types, docs (under 1 minute)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir .mkdocs_check
	rm -rf .mkdocs_check

docs: $(READY) ## build the site in site/, which also opens without a server
	$(BIN)/python docs/errors.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(READY) ## build sdist and wheel in dist/, and check them in an empty environment
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/python benchmarks/check_dist.py dist

format: $(READY) ## apply the formatter and the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## measure kernels, steps, lab and wire, write benchmarks/data/*.csv and the docs' tables (25 minutes)
	$(BIN)/gradsieve bench kernels --out benchmarks/data/kernels.csv
	$(BIN)/gradsieve bench step --out benchmarks/data/step.csv
	$(BIN)/gradsieve bench wire --out benchmarks/data/wire.csv
	$(BIN)/gradsieve bench lab --out benchmarks/data/lab.csv
	$(BIN)/python benchmarks/tables.py

lab: $(READY) ## train on MNIST between hosts with 100 Mbit/s links, draw the docs' pictures (30 minutes)
	sh benchmarks/lab.sh
	$(MAKE) figures

figures: $(READY) ## draw the docs' pictures from benchmarks/
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[figures]'
	$(BIN)/python benchmarks/figures.py

reports: $(READY) ## train on MNIST, WikiText-2 and SST-2 from GRADSIEVE_DATA, write benchmarks/reports/ (1 hour)
	sh benchmarks/reports.sh

reproduce: $(READY) ## regenerate the papers' claims from GRADSIEVE_DATA, write benchmarks/reproduction/ and the docs' tables (5 hours)
	$(BIN)/python -m studies all density-control --out benchmarks/reproduction || test $$? -eq 1
	$(BIN)/python benchmarks/tables.py

faults: $(READY) ## break things on purpose: 1,000 trials, 20 minutes (root for disks and links); 2 minutes: make faults ARGS=--quick
	$(BIN)/python -m studies.faults $(ARGS)

clean: ## remove everything that was built
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis dist site .mkdocs_check
	find src tests examples -name __pycache__ -prune -exec rm -rf {} +
