# Every target works in a fresh clone: the virtual environment is made when it is missing or out of date.
SHELL  := /bin/bash
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

IMAGE  ?= noloco-node
BUILD_IMAGE ?= docker build

LOCKS := docker/requirements
# torch comes from the index of its platform: it and what it brings for CUDA have no hash here
NOT_LOCKED := ^(torch|triton|nvidia-|cuda-)
COMPILE := uv pip compile pyproject.toml --python-version 3.11 --universal --upgrade \
	--generate-hashes --no-emit-index-url --no-annotate --no-header --quiet
# By uv, which takes a quarter of pip's time; by pip where uv cannot reach the index
define install
	@echo "Installing what $(1).lock has, torch among it: two to ten minutes the first time, with no word in between."
	$(BIN)/pip install --quiet --requirement $(LOCKS)/uv.txt
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps --require-hashes --requirement $(LOCKS)/$(1).lock || \
	  $(BIN)/pip install --quiet --no-deps --require-hashes --requirement $(LOCKS)/$(1).lock
	$(BIN)/pip install --quiet --requirement $(LOCKS)/torch.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
endef

# Licences of what a node needs: those that let it be given on with MIT-licensed code
LICENCES := MIT;BSD;Apache;Python Software Foundation;PSF;ISC;Mozilla Public License;MPL;Unlicense;CC0;Public Domain;Zlib;HPND

.PHONY: help swarm test test-long check newest coverage lint bench bench-tiny look pages docs lock audit sbom fuzz image image-test clean

help:  ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r target what; do \
	  printf '%-12s' "$$target"; echo "$$what" | fold -s -w 66 | sed '2,$$s/^/            /'; done

$(VENV)/.installed: pyproject.toml $(LOCKS)/test.lock $(LOCKS)/torch.txt $(LOCKS)/uv.txt
	$(PYTHON) -m venv $(VENV)
	$(call install,test)
	touch $@

# What only long tests need beside that: lm-eval and a browser's driver
$(VENV)/.installed-for-all: $(VENV)/.installed $(LOCKS)/check.lock
	$(call install,check)
	touch $@

swarm: $(VENV)/.installed  ## six real peers on this machine train one Llama on real text
	$(BIN)/noloco swarm

test: $(VENV)/.installed  ## the gate: what no clock, process or memory of the machine can make fail
	$(BIN)/pytest -n auto --tb=native -m "not long"

IN_VIRTUAL_TIME := tests/real/test_virtual_benchmarks.py
HANGS := 1800  # seconds after which a long test does: the longest take five minutes of two idle cores

test-long: $(VENV)/.installed-for-all  ## the rest: long studies in virtual time; then real time, one after another
	$(BIN)/pytest -n auto --tb=native --timeout $(HANGS) -m long $(IN_VIRTUAL_TIME) tests/unit tests/swarm tests/fuzz
	$(BIN)/pytest --tb=native --timeout $(HANGS) -m long --reruns 1 -rR --ignore $(IN_VIRTUAL_TIME) tests/real tests/attacks tests/journeys

lint: $(VENV)/.installed  ## ruff, ruff format and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test test-long  ## what CI runs, and everything long; a test in real time may fail once, and is named

newest:  ## the gate with the newest of everything that pyproject.toml allows, in build/newest; says what is newer
	@echo "Installing into build/newest: some minutes, with no word in between."
	$(PYTHON) -m venv build/newest
	build/newest/bin/pip install --quiet --upgrade --editable '.[test]'
	-build/newest/bin/pip freeze | tr A-Z_ a-z- | grep '^[a-z].*==' | \
	  grep -vxFf <(sed -n 's/^\([a-z].*==[^ ]*\).*/\1/p' $(LOCKS)/test.lock $(LOCKS)/torch.txt) > build/newer.txt
	@echo "Other versions than in $(LOCKS)/test.lock:"; cat build/newer.txt
	-build/newest/bin/pytest -n auto --tb=native -m "not long"

coverage: $(VENV)/.installed  ## lines and branches that the gate reaches, and those it does not
	$(BIN)/pytest -n auto --hypothesis-profile=few --cov --cov-report=term-missing:skip-covered --cov-report=html:build/coverage -m "not long"

bench: $(VENV)/.installed  ## every benchmark; prints ratios
	for file in benchmarks/[a-z]*.py; do $(BIN)/python $$file || exit 1; done

bench-tiny: $(VENV)/.installed  ## the same so small that it tells only whether they run; tests/real does it, too
	for file in benchmarks/[a-z]*.py; do $(BIN)/python $$file --tiny || exit 1; done

lock:  ## docker/requirements/*.lock anew: what development, CI and the image install, with hashes; needs the network
	$(PYTHON) -m venv build/uv && build/uv/bin/pip install --quiet --requirement $(LOCKS)/uv.txt
	build/uv/bin/$(COMPILE) --extra test --extra eval --extra browser > build/check.lock
	build/uv/bin/$(COMPILE) --extra test --constraint build/check.lock > build/test.lock
	build/uv/bin/$(COMPILE) --extra data --constraint build/check.lock > build/image.lock
	for name in check test image; do \
	  awk '/^[a-z]/ {keep = !/$(NOT_LOCKED)/} keep' build/$$name.lock > $(LOCKS)/$$name.lock || exit 1; done

audit: $(VENV)/.installed  ## known weaknesses and the licences of what a node installs; asks the advisory service
	$(BIN)/pip install --quiet --editable '.[audit]'
	$(BIN)/pip-audit --disable-pip --no-deps --requirement docker/requirements/image.lock
	$(BIN)/pip-licenses --partial-match --allow-only "$(LICENCES)" --packages \
	  $$(sed -n 's/==.*//p' docker/requirements/image.lock)

sbom: $(VENV)/.installed  ## build/sbom.json: what a node is made of, for CycloneDX's readers
	$(BIN)/pip install --quiet --editable '.[audit]'
	mkdir -p build && $(BIN)/cyclonedx-py requirements docker/requirements/image.lock --output-file build/sbom.json

fuzz: $(VENV)/.installed  ## ten minutes: every decoder and whole sessions; goes further with pip install '.[fuzz]'
	$(BIN)/python -W ignore -m tests.fuzz

look: $(VENV)/.installed  ## a report of what a reader would stumble over: lengths, docstrings, words; nothing fails by it
	$(BIN)/python -m tests.look

pages: $(VENV)/.installed  ## docs/files.md, docs/answers.md and the counts of docs/walks.md, from the code
	$(BIN)/python -m tests.pages
	$(BIN)/python -m tests.unit.test_answers_page

docs: $(VENV)/.installed  ## the pages of docs/ as a site, in build/site; a link that leads nowhere fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

image:  ## docker/Dockerfile for the CPU; BUILD_IMAGE="docker build --build-arg …" for another, or buildah
	$(BUILD_IMAGE) --build-arg COMMIT=$$(git rev-parse HEAD) -f docker/Dockerfile -t $(IMAGE) .

image-test: $(VENV)/.installed  ## that image, run in network namespaces; needs root and buildah, takes minutes
	IMAGE=$(IMAGE) BUILD_IMAGE="$(BUILD_IMAGE)" $(BIN)/pytest -s docker/test_image.py

clean:  ## remove what make has made
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
