# Every target works in a fresh clone: the virtual environment is made when it is missing or out of date.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

IMAGE  ?= noloco-node
BUILD_IMAGE ?= docker build

# Real processes and real time: one after another, and beside them those to which time means little
BESIDE := -n 2 --dist loadgroup

.PHONY: swarm test test-long check coverage lint bench bench-tiny image image-test clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

swarm: $(VENV)/.installed  ## six real peers on this machine train one Llama on real text
	$(BIN)/noloco swarm

test: $(VENV)/.installed  ## what can be told in six minutes on two cores; needs no network but loopback
	$(BIN)/pytest -n auto -m "not long" tests/unit tests/swarm
	$(BIN)/pytest $(BESIDE) -m "not long" tests/network tests/attacks

test-long: $(VENV)/.installed  ## the rest: long studies in virtual time, whole lives of real swarms
	$(BIN)/pytest -n auto -m long tests/unit tests/swarm
	$(BIN)/pytest $(BESIDE) -m long tests/network

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test test-long  ## what CI runs

coverage: $(VENV)/.installed  ## lines and branches that the tests in virtual time reach, and those they do not
	$(BIN)/pytest -n auto --cov --cov-report=term-missing:skip-covered --cov-report=html:build/coverage tests/unit tests/swarm

bench: $(VENV)/.installed  ## every benchmark; prints ratios
	for file in benchmarks/[a-z]*.py; do $(BIN)/python $$file || exit 1; done

bench-tiny: $(VENV)/.installed  ## the same so small that it tells only whether they run; tests/network does it, too
	for file in benchmarks/[a-z]*.py; do $(BIN)/python $$file --tiny || exit 1; done

image:  ## docker/Dockerfile for the CPU; BUILD_IMAGE="docker build --build-arg …" for another, or buildah
	$(BUILD_IMAGE) -f docker/Dockerfile -t $(IMAGE) .

image-test: $(VENV)/.installed  ## that image, run in network namespaces; needs root and buildah, takes minutes
	IMAGE=$(IMAGE) BUILD_IMAGE="$(BUILD_IMAGE)" $(BIN)/pytest -s docker/test_image.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
