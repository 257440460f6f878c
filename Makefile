# Everything runs in a virtual environment of its own, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-s3 explore lint bench bench-deep bench-parts serve clean

# Two processors are busy with three at a time, since many tests wait for stores and processes; a
# file stays on one, with its servers, and long files come first.
test: lint
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Properties and models with other examples than those that every run of the tests tries.
explore: $(READY)
	ODQ_EXAMPLES=explore $(BIN)/python -m pytest -n 3 --dist loadfile \
		tests/filters tests/format tests/http tests/log tests/queues tests/retention tests/root \
		tests/runtime tests/store/damage/test_damage.py

# Against any S3: make test-s3 ENDPOINT=http://127.0.0.1:7480 BUCKET=odq-tests, with credentials in
# AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Each run has a prefix of its own, and removes it.
test-s3: $(READY)
	@test -n "$(ENDPOINT)" || { echo "which S3? make test-s3 ENDPOINT=http://host:port"; exit 1; }
	ODQ_TEST_S3_ENDPOINT=$(ENDPOINT) ODQ_TEST_S3_BUCKET=$(or $(BUCKET),odq-tests) \
		$(BIN)/python -m pytest -n 2 --dist loadfile -rs tests/contract tests/log tests/queues \
		tests/root tests/routing tests/runtime tests/retention tests/systems \
		tests/http/test_takeover.py tests/http/test_ending.py tests/spark tests/store tests/api \
		tests/cli

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(READY)
	$(BIN)/python -m examples.demo

# Under 15 minutes, on a machine that does nothing else: all systems that are installed side by side,
# cost on object storage, and growth. It writes the figures into docs/benchmarks.md.
bench: $(READY)
	$(BIN)/python -m benchmarks.compare --write docs/benchmarks.md

# 8 minutes on a quiet machine, and 20 GB of disk: growth up to ten million messages and 100,000 queues.
bench-deep: $(READY)
	$(BIN)/python -m benchmarks.compare --parts growth --growth backlog,queues --deep \
		--write docs/benchmarks.md

# Parts of ours alone, each in detail. The last one makes a backlog of a million messages first: run
# benchmarks/lifecycle.py with --quick for a first impression.
bench-parts: $(READY)
	$(BIN)/python benchmarks/encodings.py
	$(BIN)/python benchmarks/filters.py
	$(BIN)/python benchmarks/event_loop.py
	$(BIN)/python benchmarks/routing.py
	$(BIN)/python benchmarks/publish.py
	$(BIN)/python benchmarks/retention.py
	$(BIN)/python -m benchmarks.http
	$(BIN)/python -m benchmarks.spark
	$(BIN)/python benchmarks/lifecycle.py

serve: $(READY)
	$(BIN)/odq serve --store $(or $(STORE),file://$(CURDIR)/build/root)

$(READY): pyproject.toml hatch_build.py $(wildcard opendata_queue/store/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
