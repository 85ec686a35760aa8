# make chat   sets everything up, fetches a small real model and opens the chat on it; from the second time on at once, offline
# make test   lint, types and tests, as .ci/run does
# make bench-peer LLAMA=build FILES='a.gguf b.gguf'   the CPU beside llama.cpp, alternating; build: where llama-bench was built
# Needs Python 3.11 or newer (PYTHON=... for one that is not called python3) and nothing else.

PYTHON ?= python3
MODEL ?= smollm2:135m
PIP = .venv/bin/python -m pip --disable-pip-version-check --quiet

chat: .venv/.installed
	@.venv/bin/tinychat $(MODEL)

test: .venv/.installed-dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/pytest -n 2

# Up to date unless what tinychat depends on has changed: the code itself is used from where it is.
.venv/.installed: pyproject.toml | .venv/bin/pip
	@echo "installing tinychat and what it needs into .venv (once, about a minute)"
	@$(PIP) install --editable .
	@touch $@

.venv/.installed-dev: pyproject.toml | .venv/bin/pip
	@echo "installing tinychat and its tools into .venv (once, about a minute)"
	@$(PIP) install --editable '.[dev]'
	@touch .venv/.installed $@

.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/it")'
	@$(PYTHON) -m venv .venv

bench-peer: .venv/.installed
	.venv/bin/python scripts/bench_peer.py --llama $(LLAMA) $(FILES)

.PHONY: chat test bench-peer
