# Every target works in a fresh clone: the virtual environment is made when it is missing or out of date.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

IMAGE  ?= noloco-node
BUILD_IMAGE ?= docker build

# Real processes and real time: one after another, and beside them those to which time means little
BESIDE := -n 2 --dist loadgroup

# torch comes from the index of its platform: it and what it brings for CUDA have no hash here
NOT_LOCKED := ^(torch|triton|nvidia-|cuda-)
LOCK := uv pip compile pyproject.toml --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	--generate-hashes --no-emit-index-url --no-annotate --no-header --quiet
# Licences of what a node needs: those that let it be given on with MIT-licensed code
LICENCES := MIT;BSD;Apache;Python Software Foundation;PSF;ISC;Mozilla Public License;MPL;Unlicense;CC0;Public Domain;Zlib;HPND

.PHONY: swarm test test-long check coverage lint bench bench-tiny docs lock locked audit sbom fuzz image image-test clean

$(VENV)/.installed: pyproject.toml docker/requirements/torch.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint docker/requirements/torch.txt --editable '.[test]'
	touch $@

swarm: $(VENV)/.installed  ## six real peers on this machine train one Llama on real text
	$(BIN)/noloco swarm

test: $(VENV)/.installed  ## the gate: what no clock, process or memory of the machine can make fail
	$(BIN)/pytest -n auto --tb=native -m "not long" tests/unit tests/swarm tests/fuzz

test-long: $(VENV)/.installed  ## the rest: long studies in virtual time, whole lives of real swarms
	$(BIN)/pytest -n auto --tb=native -m long tests/unit tests/swarm
	$(BIN)/pytest $(BESIDE) --tb=native tests/real tests/attacks

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test test-long  ## what CI runs, and everything long

coverage: $(VENV)/.installed  ## lines and branches that the tests in virtual time reach, and those they do not
	$(BIN)/pytest -n auto --cov --cov-report=term-missing:skip-covered --cov-report=html:build/coverage tests/unit tests/swarm

bench: $(VENV)/.installed  ## every benchmark; prints ratios
	for file in benchmarks/[a-z]*.py; do $(BIN)/python $$file || exit 1; done

bench-tiny: $(VENV)/.installed  ## the same so small that it tells only whether they run; tests/real does it, too
	for file in benchmarks/[a-z]*.py; do $(BIN)/python $$file --tiny || exit 1; done

lock: $(VENV)/.installed  ## docker/requirements/*.lock anew: what the image and CI install, with hashes; needs the network
	$(BIN)/pip install --quiet '.[audit]'
	for set in "image --extra data" "test --extra test"; do set -- $$set; name=$$1; shift; \
	  $(BIN)/$(LOCK) "$$@" | awk '/^[a-z]/ {keep = !/$(NOT_LOCKED)/} keep' > docker/requirements/$$name.lock || exit 1; done

locked:  ## .venv with the very versions of docker/requirements/test.lock: Linux on x86-64, Python 3.11 or 3.12
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps --require-hashes --requirement docker/requirements/test.lock
	$(BIN)/pip install --quiet --requirement docker/requirements/torch.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(VENV)/.installed

audit: $(VENV)/.installed  ## known weaknesses and the licences of what a node installs; asks the advisory service
	$(BIN)/pip install --quiet '.[audit]'
	$(BIN)/pip-audit --disable-pip --no-deps --requirement docker/requirements/image.lock
	$(BIN)/pip-licenses --partial-match --allow-only "$(LICENCES)" --packages \
	  $$(sed -n 's/==.*//p' docker/requirements/image.lock)

sbom: $(VENV)/.installed  ## build/sbom.json: what a node is made of, for CycloneDX's readers
	$(BIN)/pip install --quiet '.[audit]'
	mkdir -p build && $(BIN)/cyclonedx-py requirements docker/requirements/image.lock --output-file build/sbom.json

fuzz: $(VENV)/.installed  ## ten minutes: every decoder and whole sessions; goes further with pip install '.[fuzz]'
	$(BIN)/python -W ignore -m tests.fuzz

docs: $(VENV)/.installed  ## the pages of docs/ as a site, in build/site; a link that leads nowhere fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

image:  ## docker/Dockerfile for the CPU; BUILD_IMAGE="docker build --build-arg …" for another, or buildah
	$(BUILD_IMAGE) -f docker/Dockerfile -t $(IMAGE) .

image-test: $(VENV)/.installed  ## that image, run in network namespaces; needs root and buildah, takes minutes
	IMAGE=$(IMAGE) BUILD_IMAGE="$(BUILD_IMAGE)" $(BIN)/pytest -s docker/test_image.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
