# make fit        the embedded example, from nothing: makes .venv, installs, trains (ARGS="--supervision graded" and so on)
# make check      the same environment with the extra `test`; lint, types, doctests and all quick tests
# make test       the same with the tests that start a program, a federation, Ray, notebooks or a browser, or kill processes
# make lowest     the quick tests, and those of W&B and exports, with the lowest versions that pyproject.toml allows
# make lock       requirements.lock anew: the newest version of everything that the package and its tests need, with hashes
# make docs       the documentation site, in build/site; a broken link or a missing docstring is an error
# make bench      all benchmarks, in about three hours on two cores; they write their tables into docs/
# make peers      the same job by hand, by Flower, by pfl-research and by this package, in an environment of its own
# make notebooks  run the notebooks and put their outputs into them
# make wheel      build the wheel, install it alone in an empty environment and run it outside the checkout

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# processes of pytest
WORKERS ?= 2
# quick tests: a process that has none left takes some of another's
QUICK := -n $(WORKERS) --dist worksteal -m "not slow"
# a file's tests share its fixtures, such as a Ray cluster, and stay together
ALL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# without bytecode every process compiles the package and its tests anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: fit check test lint quick everything lowest lock docs wheel bench peers notebooks clean

fit: $(VENV)/.installed
	$(BIN)/jdfl-lightning fit $(ARGS)

# types are checked on one core, beside the tests
check:
	@$(MAKE) --no-print-directory --jobs 2 lint quick

test:
	@$(MAKE) --no-print-directory --jobs 2 lint everything

quick: $(VENV)/.installed-test
	$(BIN)/pytest $(QUICK) $(ARGS)

everything: $(VENV)/.installed-test
	$(BIN)/pytest $(ALL) $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

lowest: build/uv/bin/uv
	$(PYTHON) -m venv build/lowest
	build/uv/bin/uv pip install --quiet --python build/lowest/bin/python --resolution lowest-direct --editable '.[test]'
	build/lowest/bin/python -m pytest $(QUICK) $(ARGS)
	build/lowest/bin/python -m pytest -m slow tests/test_loggers.py tests/test_export.py

# for every Python and system, from the public index: uv does not read the settings of pip, nor here its own
lock: build/uv/bin/uv
	build/uv/bin/uv pip compile --quiet --no-config --upgrade --universal --python-version 3.10 --prerelease disallow \
		--extra test --generate-hashes --custom-compile-command 'make lock' \
		--output-file requirements.lock pyproject.toml

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict $(ARGS)

wheel: $(VENV)/.installed-test
	$(BIN)/python tests/wheel_check.py

notebooks: $(VENV)/.installed-test
	$(BIN)/python tests/notebook_outputs.py

bench: $(VENV)/.installed-test
	$(BIN)/python benchmarks/rounds.py --size 112 --clients 4 --images 800 --turns 3 --algorithms SCAFFOLD FedDyn FedDC
	$(BIN)/python benchmarks/rounds.py --size 32 --images 2240 --turns 3
	$(BIN)/python benchmarks/state_costs.py
	$(BIN)/python benchmarks/allocation.py
	$(BIN)/python benchmarks/tiny_clients.py
	$(BIN)/python benchmarks/cached_features.py
	$(BIN)/python benchmarks/many_clients.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/start.py
	$(BIN)/python benchmarks/shares.py
	$(BIN)/python benchmarks/discovery_scale.py
	$(BIN)/python benchmarks/kills.py
	$(BIN)/python benchmarks/fuzz.py
	$(BIN)/python benchmarks/registered.py
	$(BIN)/python benchmarks/registered.py --features --per_round 1000 --clients 1000 10000 100000 --rounds 12 --probed 10000
	$(BIN)/python benchmarks/ray_rounds.py
	$(BIN)/python benchmarks/flower_rounds.py

build/uv/bin/uv:
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip install --quiet --disable-pip-version-check uv

# pfl wants older versions of some packages than the tests do, and Flower's simulation one version of Ray; together they
# need Python 3.11 or 3.12
peers:
	$(PYTHON) -m venv build/peers
	build/peers/bin/python -m pip install --quiet --disable-pip-version-check --editable . 'flwr[simulation]>=1.41,<2' 'pfl[pytorch]==0.6.0'
	build/peers/bin/python benchmarks/peers.py $(ARGS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@ $(VENV)/.installed $(VENV)/.installed-docs

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
