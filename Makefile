# Each target sets up what it needs; only Python 3.11+ and make are required.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.run-$(shell cksum requirements/run.lock 2>/dev/null | cut -d' ' -f1)
SPARK_STAMP := $(VENV)/.spark-$(shell cksum requirements/spark.lock 2>/dev/null | cut -d' ' -f1)
DEV_STAMP := $(VENV)/.dev-$(shell cksum requirements/dev.lock 2>/dev/null | cut -d' ' -f1)
PYTEST_ARGS ?=
BENCH_ARGS ?=
FUZZ_ARGS ?=
SOAK_ARGS ?=
CHAOS_ARGS ?=
SIMULATE_ARGS ?=

# Without a bytecode cache, every process of every target would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: $(shell grep -ohE '^[a-z-]+:' $(MAKEFILE_LIST) | tr -d :)
.DEFAULT_GOAL := help

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Millstream needs Python 3.11 or newer; none was found on the PATH." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): requirements/run.lock pyproject.toml | $(BIN)/python
	@echo "Setting up $(VENV) (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/run.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(DEV_STAMP): requirements/dev.lock pyproject.toml | $(BIN)/python
	@echo "Setting up $(VENV) with the test tools (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(RUN_STAMP) ## Run the main job end to end on a temporary broker, and report each step
	@DEMO_SPARK_SETUP="$(MAKE) --no-print-directory spark" $(BIN)/python -m millstream.cli.main demo

spark: $(SPARK_STAMP) ## Add Spark to the virtual environment, for pipelines and the data source

$(SPARK_STAMP): requirements/spark.lock | $(RUN_STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/spark.lock
	@touch $@

serve: $(RUN_STAMP) ## Start a broker on the default ports with its data in ./millstream-data
	@$(BIN)/millstream serve

test: $(DEV_STAMP) ## Run all tests (ten minutes on 2 cores)
	@$(BIN)/python -m pytest -n 4 --dist loadfile $(PYTEST_ARGS)

trials: $(DEV_STAMP) ## Run the tests that take longer: more faults, more examples, ten thousand partitions, Spark (half an hour)
	@TMPDIR=$${TMPDIR:-/tmp} LOG_EXAMPLES=600 $(BIN)/python -m pytest -n 2 --dist loadfile -m trial --hypothesis-profile=exploring $(PYTEST_ARGS)
	@TMPDIR=$${TMPDIR:-/tmp} LOG_EXAMPLES=600 $(BIN)/python -m pytest -n 2 --dist loadfile tests/unit --hypothesis-profile=exploring $(PYTEST_ARGS)

check: $(DEV_STAMP) ## Lint, types, layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

bench: $(DEV_STAMP) ## Measure against the limit server, Apache Kafka and other peers (15 minutes; BENCH_ARGS=--quick: 1)
	@$(BIN)/python -m benchmarks.run $(BENCH_ARGS)

bench-cluster: $(DEV_STAMP) ## Measure three nodes against one, failover over 50 kills, and 10,000 partitions (half an hour; BENCH_ARGS=--quick: 3)
	@$(BIN)/python -m benchmarks.cluster $(BENCH_ARGS)

bench-upsert: $(DEV_STAMP) ## Measure what batches of changes to random keys cost an upsert table, beside deltalake's MERGE (a minute; BENCH_ARGS="--keys 10000000": 5)
	@$(BIN)/python -m benchmarks.upsert $(BENCH_ARGS)

bench-transactions: $(DEV_STAMP) ## Measure producing in transactions and reading committed messages, also against Apache Kafka (10 minutes; BENCH_ARGS=--quick: 2)
	@$(BIN)/python -m benchmarks.transactions $(BENCH_ARGS)

bench-queues: $(DEV_STAMP) ## Measure subscriptions as queues against RabbitMQ, NATS JetStream and Redis (10 minutes; BENCH_ARGS=--quick: 4)
	@$(BIN)/python -m benchmarks.queues $(BENCH_ARGS)

bench-http: $(DEV_STAMP) ## Measure publishing over HTTP against the same server's plain echo (a minute)
	@$(BIN)/python -m benchmarks.http $(BENCH_ARGS)

bench-schemas: $(DEV_STAMP) ## Measure what schema rules on topics cost, beside topics without one (2 minutes)
	@$(BIN)/python -m benchmarks.schemas $(BENCH_ARGS)

bench-sdk: $(DEV_STAMP) ## Measure the Python SDK against aiokafka, confluent-kafka's asyncio client, aio-pika and nats-py (8 minutes; BENCH_ARGS=--quick: 2)
	@$(BIN)/python -m benchmarks.sdk $(BENCH_ARGS)

bench-spark: $(DEV_STAMP) ## Measure Spark on topics against Parquet, a row-by-row source and Spark's own connector (25 minutes; BENCH_ARGS=--quick: 4)
	@$(BIN)/python -m benchmarks.spark $(BENCH_ARGS)
	@$(BIN)/python -m benchmarks.spark_landing $(filter --quick,$(BENCH_ARGS))
	@$(BIN)/python -m benchmarks.spark_topics $(BENCH_ARGS)

bench-replay: $(DEV_STAMP) ## Measure how fast messages are replayed from the log and from landed tables (two minutes)
	@$(BIN)/python -m benchmarks.replay $(BENCH_ARGS)

bench-rejoin: $(DEV_STAMP) ## Measure the pause of pipelines when their driver is killed, without and with a spare driver (5 minutes)
	@$(BIN)/python -m benchmarks.spark_rejoin $(BENCH_ARGS)

bench-cores: $(DEV_STAMP) ## Measure throughput and CPU per GB and per message with 1, 2 and 4 broker processes, beside Apache Kafka (three minutes)
	@$(BIN)/python -m benchmarks.cores $(BENCH_ARGS)

bench-commits: $(DEV_STAMP) ## Measure OffsetCommit and OffsetFetch against Produce on a busy broker (half a minute)
	@$(BIN)/python -m benchmarks.commits $(BENCH_ARGS)

bench-mirror: $(DEV_STAMP) ## Measure the lag of a mirror, its CPU, failover and the way back (a minute; BENCH_ARGS=--peer for MirrorMaker 2)
	@$(BIN)/python -m benchmarks.mirror $(BENCH_ARGS)

bench-cold-reads: $(DEV_STAMP) ## Measure what verifying stored records costs a fetch (a minute)
	@$(BIN)/python -m benchmarks.cold_reads $(BENCH_ARGS)

bench-compare: $(DEV_STAMP) ## Measure the CPU seconds of two versions, interleaved: BENCH_ARGS=COMMIT (15 minutes)
	@$(BIN)/python -m benchmarks.compare_commits $(BENCH_ARGS)

bench-filters: $(DEV_STAMP) ## Measure what the filters of subscriptions cost per message (seconds)
	@$(BIN)/python -m benchmarks.filters $(BENCH_ARGS)

bench-ledger: $(DEV_STAMP) ## Measure what a ledger costs the broker, and an audit of 100 million deliveries (10 minutes; BENCH_ARGS="--only cost": 3)
	@$(BIN)/python -m benchmarks.ledger $(BENCH_ARGS)

bench-console: $(DEV_STAMP) ## Measure the console's pages with 10,000 topics, and a search (5 minutes; BENCH_ARGS=--quick: 1, "--only search": 1)
	@$(BIN)/python -m benchmarks.console $(BENCH_ARGS)

kill-trial: $(DEV_STAMP) ## Kill a loaded broker 20 times and check every acknowledged message
	@$(BIN)/python -m trials.kill_trial

conformance: $(DEV_STAMP) ## Run the Java and Go clients against a broker; skips what Maven or Go cannot fetch
	@$(BIN)/python -m conformance.run

compare: $(DEV_STAMP) ## Send unusual requests to Apache Kafka and Millstream, and decide pairs of schemas beside Apicurio; show the differences
	@$(BIN)/python -m conformance.compare
	@$(BIN)/python -m conformance.schema_pairs

fuzz: $(DEV_STAMP) ## Fuzz the broker with broken frames, requests, data folders and records, a minute each
	@$(BIN)/python -m trials.fuzz_run $(FUZZ_ARGS)

chaos: $(DEV_STAMP) ## Kill workers and nodes while subscriptions deliver, and check every message (20 minutes)
	@$(BIN)/python -m trials.chaos_subscriptions $(CHAOS_ARGS)

chaos-http: $(DEV_STAMP) ## Kill nodes of a cluster while messages are published, leased and settled over HTTP through any of them (4 minutes)
	@$(BIN)/python -m trials.chaos_http $(CHAOS_ARGS)

chaos-cores: $(DEV_STAMP) ## Kill processes of a machine 50 times under all kinds of load, change its number of cores, and check every message (half an hour)
	@$(BIN)/python -m trials.chaos_cores $(CHAOS_ARGS)

chaos-grow: $(DEV_STAMP) ## Turn a loaded machine into a cluster, replicate and move everything under kills, and check every message (15 minutes)
	@$(BIN)/python -m trials.chaos_grow $(CHAOS_ARGS)

chaos-ledger: $(DEV_STAMP) ## Kill a node, workers and the ledger's driver, seek, redrive and truncate, then audit every message (5 minutes)
	@$(BIN)/python -m trials.chaos_ledger $(CHAOS_ARGS)

chaos-cluster: $(DEV_STAMP) ## Inject 200 faults into a loaded cluster of real processes, and check every message (half an hour)
	@$(BIN)/python -m trials.chaos_cluster $(CHAOS_ARGS)

chaos-mirror: $(DEV_STAMP) ## Kill two sites and cut the network between them, fail over, reverse and switch, and check every message (half an hour)
	@$(BIN)/python -m trials.chaos_mirror $(CHAOS_ARGS)

chaos-overload: $(DEV_STAMP) ## Flood a broker and send it decompression bombs, beside a client that must not be affected (12 minutes; CHAOS_ARGS=--peer floods Apache Kafka, too: 6 more)
	@$(BIN)/python -m trials.chaos_overload $(CHAOS_ARGS)

chaos-push: $(DEV_STAMP) ## Kill nodes, push processes and the endpoint while messages are pushed, and check every message (4 minutes)
	@$(BIN)/python -m trials.chaos_push $(CHAOS_ARGS)

chaos-security: $(DEV_STAMP) ## Move three loaded nodes from plain text to SASL over TLS, then renew their certificates every second (3 minutes)
	@$(BIN)/python -m trials.chaos_security $(CHAOS_ARGS)

chaos-transactions: $(DEV_STAMP) ## Kill programs and brokers 100 times while they work in transactions, and check every effect (20 minutes)
	@$(BIN)/python -m trials.chaos_transactions $(CHAOS_ARGS)

soak: $(DEV_STAMP) ## Run an hour of mixed load with kills, and check that memory, file handles and latency stay flat
	@$(BIN)/python -m trials.soak $(SOAK_ARGS)

simulate: $(DEV_STAMP) ## Simulate replication, transactions, machines, plans and mirrors from thousands of seeds; prints every seed that breaks a rule
	@$(BIN)/python -m trials.simulate $(SIMULATE_ARGS)

docs: $(DEV_STAMP) ## Regenerate docs/configuration.md and docs/protocol.md from the code
	@$(BIN)/python -m millstream_testing.config_reference > docs/configuration.md
	@$(BIN)/python -m millstream_testing.protocol_reference > docs/protocol.md

lock: ## Regenerate the lock files from pyproject.toml (needs uv)
	@uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--extra cluster pyproject.toml requirements/build.in -o requirements/run.lock
	@uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--extra cluster --extra spark --extra dev pyproject.toml requirements/build.in -c requirements/run.lock -o requirements/dev.lock
	@uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--extra cluster --extra spark pyproject.toml requirements/build.in -c requirements/dev.lock -o requirements/spark.lock

clean: ## Remove the virtual environment and every cache
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find src tests trials benchmarks conformance -name __pycache__ -type d -prune -exec rm -rf {} +
