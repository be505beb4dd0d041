# Needs only Python >= 3.10 and make: the first target that wants .venv creates it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: venv native wheel release matrix test test-native test-long nightly demo lint types docs lines bench bench-peers
.PHONY: drill sim fuzz nemesis
venv: $(STAMP)
# torch goes first and alone, so that a configured CPU build of the pinned release is the one that is taken.
$(STAMP): pyproject.toml constraints.txt setup.py memstore/shell/native/native.c
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[train,frameworks,safetensors,objects,compression,encryption,docs,dev]'
	$(MAKE) native
	touch $@
# The optional C helper, beside its source. pyarrow, which ray[train] brings, carries xxhash.h: no package of the system
# is needed. Without a C compiler it says so, and Python's loops copy.
XXHASH := import pathlib, pyarrow; print(pathlib.Path(pyarrow.get_include(), "arrow/vendored/xxhash"))
native:
	MEMSTORE_XXHASH_INCLUDE="$$($(BIN)/python -c '$(XXHASH)')" $(BIN)/python setup.py -q build_ext --inplace
# The same in a wheel, for machines without a compiler: in the directory DIST.
DIST ?= dist
wheel: $(STAMP)
	MEMSTORE_XXHASH_INCLUDE="$$($(BIN)/python -c '$(XXHASH)')" $(BIN)/python -m build --wheel --outdir $(DIST) .
# What a release has, checked, in the new folder dist: sdist, wheel, bill of materials.
release: $(STAMP)
	bash .ci/release
# The wheel in dist beside other versions of Python, torch and Ray: some 6 GB at a time, an hour in all.
matrix: $(STAMP)
	$(BIN)/python .ci/matrix.py dist/*.whl
# Tests wait more than they compute: three workers keep two cores busy. `pytest` alone runs one after the other.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
test: $(STAMP)
	$(PYTEST) -m "not long"
# Without the native helper: the contract of the loops that it replaces.
LOOPS := tests/unit/tensors tests/unit/net/test_channel.py tests/unit/net/test_channel_chunks.py \
  tests/unit/codec/test_checked_stream.py tests/unit/codec/test_state_codec.py tests/unit/codec/test_state_copies.py \
  tests/unit/codec/test_state_into.py tests/unit/holder/test_given_digests.py
test-native: $(STAMP)
	MEMSTORE_NATIVE=0 $(PYTEST) -m "not long" $(LOOPS)
test-long: $(STAMP)
	$(PYTEST) -m "long and not alone"
	$(BIN)/python -m pytest -m alone
# What `.ci/run` leaves out, about two hours.
nightly: $(STAMP)
	bash .ci/nightly
# Lines of the product and of its kit, beside their limits.
lines:
	$(PYTHON) tests/house/lines.py
demo: $(STAMP)
	$(BIN)/memstore demo
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
types: $(STAMP)
	$(BIN)/mypy
# The manual as a site in build/site: every link and anchor is checked, no other host is asked.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
bench: $(STAMP)
	$(BIN)/python -m benchmarks --full --out benchmarks/results
	$(BIN)/python -m benchmarks.report
# Each peer gets an environment of its own under .peers; one that does not run is reported with the reason.
bench-peers: $(STAMP)
	$(BIN)/python -m benchmarks.peers --full --out benchmarks/results
	$(BIN)/python -m benchmarks.report
drill: $(STAMP)
	$(BIN)/memstore drill run --suite standard --embedded --out drill-report
# Seconds for each target.
FUZZ_S ?= 60
fuzz: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[fuzz]'
	set -e; for target in frame body message record manifest layout state durable plan; do \
	  echo "== $$target"; $(BIN)/python -m memstore.testing.fuzz $$target $(FUZZ_S); done
# Seeds FIRST to FIRST + SEEDS - 1, as far as the record lacks them: stop it and call it again as you like.
SEEDS ?= 1000
FIRST ?= 0
sim: $(STAMP)
	$(BIN)/python -m memstore.testing.simulator --first $(FIRST) --seeds $(SEEDS) --campaign benchmarks/results/simulator.json
# Minutes of random faults on real processes; appended to the record.
MINUTES ?= 20
nemesis: $(STAMP)
	$(BIN)/python -m memstore.testing.nemesis --minutes $(MINUTES) --out benchmarks/results/nemesis.json
