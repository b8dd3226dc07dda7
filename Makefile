# Tasks of Pagegate; `make` alone lists them. Works with GNU make 3.81 (macOS) and from a path with spaces.
#
#   PYTHON            the interpreter for .venv (default: the first of python3.13 … python3.11, python3 that is new enough)
#   TORCH_INDEX_URL   a package index to take torch from, such as one with CPU-only builds (default: pip's own index)

SHELL = /bin/sh
PYTHON ?=
TORCH_INDEX_URL ?=

BIN = .venv/bin
LOCK = deploy/setup/requirements.lock
WEB_LOCK = deploy/setup/web/package-lock.json
INSTALL = PYTHON='$(PYTHON)' TORCH_INDEX_URL='$(TORCH_INDEX_URL)' sh deploy/setup/install.sh
# A stamp says which extras .venv has; it is older than what it was made from when either file changes.
SERVE_STAMP = .venv/.installed-local
TEST_STAMP = .venv/.installed-local-test
SGLANG_VENV = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/pagegate/sglang-venv
SLOW = engine or sglang or browser or load or stores

.DEFAULT_GOAL := help
# Modules that are compiled once serve all of the many processes that tests start, wherever an image says otherwise.
unexport PYTHONDONTWRITEBYTECODE
# Each task reads what the one before it made.
.NOTPARALLEL:
.PHONY: help serve install test test-fast test-search check format-check lint types imports model sglang browser bench lock clean

help: ## List the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

serve: $(SERVE_STAMP) ## Install if needed, then run the gateway with its embedded engine on 127.0.0.1:8787
	@$(BIN)/pagegate serve

install: $(SERVE_STAMP) ## Make .venv with all that `serve` needs

test: $(TEST_STAMP) model sglang browser check ## Set up everything, then check everything: what CI runs

test-fast: $(TEST_STAMP) ## The unit tests alone, with fewer examples of each property
	@$(BIN)/python -m pytest -n auto -m 'not ($(SLOW))' --hypothesis-profile=fast \
		--ignore=tests/e2e --ignore=tests/browser --ignore=tests/sglang_cpu

# Minutes for each dear property, so that no test's own time is judged; what it finds is printed with how to repeat it.
test-search: $(TEST_STAMP) ## Properties alone, with ten times the examples, drawn at random: other ones in each run
	@$(BIN)/python -m pytest -n auto -m 'hypothesis or search' --hypothesis-profile=search --timeout=3600 \
		--timeout-method=signal -o faulthandler_timeout=7200

# Types take a minute of one core: they are checked beside the tests, which do not keep two busy all the time.
check: $(TEST_STAMP) format-check lint imports ## Format, lint, import contracts, types, all tests
	@$(BIN)/mypy & types=$$!; \
	$(BIN)/python -m pytest -n 3 --dist loadfile; tests=$$?; \
	wait $$types || { echo "Types are wrong: 'make types' says where." >&2; exit 1; }; \
	exit $$tests

format-check: $(TEST_STAMP)
	@$(BIN)/ruff format --check .

lint: $(TEST_STAMP)
	@$(BIN)/ruff check .

types: $(TEST_STAMP)
	@$(BIN)/mypy

imports: $(TEST_STAMP)
	@$(BIN)/lint-imports

model: $(SERVE_STAMP) ## Fetch the default checkpoints into the cache
	@$(BIN)/pagegate models pull
	@$(BIN)/pagegate models pull all-minilm-l6-v2

sglang: $(TEST_STAMP) ## Install the real SGLang for the CPU beside the cache (2.6 GB, once); the `sglang` tests run it
	@PYTHON='$(CURDIR)/$(BIN)/python' TORCH_INDEX_URL='$(TORCH_INDEX_URL)' sh tests/sglang_cpu/install.sh '$(SGLANG_VENV)'

browser: ## Install Chromium if it is missing (Debian, as root); the `browser` tests run it
	@sh tests/browser/install.sh

bench: $(TEST_STAMP) model ## Measure the engine beside transformers, and the gateway beside a bare proxy
	@$(BIN)/python -m benchmarks.engine_speed
	@$(BIN)/python benchmarks/gateway_cost.py

lock: ## Write the versions now in .venv to the lock file
	@sh deploy/setup/lock.sh > $(LOCK).new && mv $(LOCK).new $(LOCK)

clean: ## Remove .venv and the tools' caches; the checkpoints and the data folder stay
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(SERVE_STAMP): pyproject.toml $(LOCK) $(WEB_LOCK)
	@$(INSTALL) local

$(TEST_STAMP): pyproject.toml $(LOCK) $(WEB_LOCK)
	@$(INSTALL) local,test
