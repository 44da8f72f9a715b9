# kvagent: `make demo` shows it at work, `make check` is the fast loop, `make test` the daily tests
# of Go and Python, `make gate` those and the connector in vLLM, which every change has to pass,
# `make ci` everything; `make help` lists the rest. Needs Go 1.26 and make; `make deps` installs or
# names everything else.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

# As in python/version.py: the tag's, or before the first one 0.1.0-dev with the number of commits.
VERSION ?= $(shell { git describe --tags --dirty || \
	echo "v0.1.0-dev-$$(git rev-list --count HEAD)-g$$(git describe --always --dirty)" | grep -v -- -g$$ || \
	echo unknown; } 2>/dev/null)
# Go stops the build if git refuses to work (a checkout of another owner): check first.
BUILDVCS := $(shell git rev-parse HEAD >/dev/null 2>&1 && echo true || echo false)
# The CUDA path is in every build by make; the driver's library is opened at run time. cu finds its
# header by CGO_CFLAGS alone. They are set for every stage, even without the tag cuda: under other
# flags Go compiles net again, and everything that imports it.
export CGO_CFLAGS  := -O2 -g -I$(CURDIR)/third_party/cuda/include
export CGO_LDFLAGS := -O2 -g -L$(CURDIR)/cudaipc/driver/stublib
GO_BUILD := go build -tags cuda -trimpath -buildvcs=$(BUILDVCS) -ldflags '-X main.version=$(VERSION)'
# `make check` lints what changed since this commit: by default, where the branch left main.
BASE     ?= $(shell git merge-base HEAD origin/main 2>/dev/null || \
	git merge-base HEAD main 2>/dev/null || git rev-parse HEAD)

# -vet=off: `make lint` vets everything, with more checks; go test would repeat it, also for
# imported packages, once with -race and once without.
# -trimpath, as in GO_BUILD and in the linter's environment, so that all share what is compiled, and
# other clones too.
GO_TEST_FLAGS ?= -race -vet=off -p 2 -timeout 15m -trimpath
GO_TEST_PLAIN := $(filter-out -race,$(GO_TEST_FLAGS))
# A process with the race detector sleeps a second before it ends, to detect goroutines that outlive
# main. Ours are joined, and tests end a hundred processes.
export GORACE ?= atexit_sleep_ms=50
FUZZTIME      ?=
TRACE         ?= testdata/conversation_1000.jsonl

STAGE := scripts/stage
# A failed test runs again, twice at most; what passes then is listed at the end.
FLAKY := scripts/flaky
comma := ,
PYTHON_SCRIPTS := $(addprefix ../scripts/,cuda-header-check run-page size try release) ../deploy/releasetest
# Everything outside of the tree, installed on first use.
ENV    := $(CURDIR)/scripts/env
VENV   = $$($(ENV) tools)
LINT   = $$($(ENV) lint) run --allow-parallel-runners

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: deps
deps: deps-of-tests ## install what `make check` and `make test` need (packages as root on Debian, else name them)
	@$(STAGE) linter $(ENV) lint

.PHONY: deps-of-tests
deps-of-tests: packages
	@$(STAGE) modules $(ENV) modules
	@$(STAGE) gotestsum $(ENV) gotestsum
	@$(STAGE) venv $(ENV) tools
	@$(STAGE) servers $(ENV) servers

.PHONY: packages
packages:
	@$(ENV) packages go python servers

.PHONY: build
build: ## bin/kvagent, and bin/kvbench, which tests it: mock engines, traces, measurements
	@$(ENV) packages go
	@$(STAGE) build $(GO_BUILD) -o bin/ ./cmd/kvagent ./cmd/kvbench

.PHONY: demo
demo: build ## one agent, two mock engines, the first 1,000 requests of a real trace
	@bin/kvbench replay --trace testdata/conversation_1000.jsonl --engines 2 --progress --pace 10s

.PHONY: try
try: wheel cpu-vllm ## vLLM on processors, a tiny model, two engines: the first token computed, and loaded by kvagent
	@source build/cpu-vllm/bin/activate && python scripts/try build/cpu-vllm

.PHONY: cpu-vllm
cpu-vllm: # build/cpu-vllm: vLLM that runs on processors, with the wheel of dist/ and a tiny model
	@$(ENV) packages python
	@$(STAGE) -v vllm-venv $(ENV) vllm
	@$(STAGE) -v vllm-serve-venv $(ENV) vllm-serve
	@$(STAGE) cpu-vllm scripts/cpu-vllm build/cpu-vllm

.PHONY: test-start
test-start: ## a newcomer's way, with an empty HOME: `make try`, docs/TUTORIAL.md as it stands, figures of engines
	@$(WITH_VLLM) $(STAGE) -v test-start scripts/test-start

# ---- The loop: each of the three includes the one before; no stage is in two of them.

.PHONY: check
check: export GOPROXY := off
check: ## format, lint of what changed, unit tests: two minutes, no download, no agents
	@for name in 'packages go python' modules lint tools; do $(ENV) --have $$name >/dev/null; done
	@scripts/beside '$(MAKE) lint-changed test-python-units' '$(MAKE) test-go-units'

.PHONY: test
test: ## lint and the daily tests of Go (race detector) and Python, with real agents and servers; no vLLM
	@$(FLAKY) $(MAKE) test-stages

.PHONY: test-stages
test-stages: deps-of-tests build
	@scripts/beside '$(MAKE) lint' '$(MAKE) test-go test-python test-cuda-smoke'

.PHONY: gate
gate: packages vllm-early ## what every change has to pass: `make test` and a short run of the connector in vLLM
	@$(FLAKY) $(MAKE) test test-vllm-short

.PHONY: ci
ci: packages vllm-early ## everything
	@$(FLAKY) $(MAKE) test test-rest

.PHONY: test-rest
test-rest: build # long tests, vLLM, CUDA, wheels, release, chart, several nodes, fuzzing, mutants, figures
	@scripts/beside '$(MAKE) fuzz dockerfile-check cuda-header-check test-wheel test-release test-chart test-mixin \
			test-softcuda test-cuda torture-cuda-short mutants-vllm' \
		'$(MAKE) test-long test-vllm test-vllm-oldest test-vllm-identity test-start torture-short torture-nodes-short'
	@$(MAKE) test-figures

# ---- Lint

.PHONY: lint
lint: lint-go lint-python ## formatting and static checks, Go and Python

CUDA_LINTED := ./cudaipc/... ./transfer ./cmd/kvagent ./lab/...

.PHONY: lint-go
lint-go: export GOFLAGS := -trimpath
lint-go: # gofmt, vet, staticcheck and more: .golangci.yml
	@$(ENV) packages go
	@$(STAGE) linter $(ENV) lint
	@$(STAGE) golangci-lint $(LINT) ./...
	@$(STAGE) golangci-lint-cuda $(LINT) --build-tags cuda,softcuda $(CUDA_LINTED)

.PHONY: lint-changed
lint-changed: export GOFLAGS := -trimpath
lint-changed: lint-python # of Go code what changed since BASE
	@$(STAGE) golangci-lint $(LINT) --new-from-rev $(BASE) ./...
	@$(STAGE) golangci-lint-cuda $(LINT) --new-from-rev $(BASE) --build-tags cuda,softcuda $(CUDA_LINTED)

.PHONY: lint-python
lint-python:
	@$(ENV) packages python
	@$(STAGE) venv $(ENV) tools
	@cd python && ../$(STAGE) ruff-format $(VENV)/bin/ruff format --check . $(PYTHON_SCRIPTS)
	@cd python && ../$(STAGE) ruff $(VENV)/bin/ruff check . $(PYTHON_SCRIPTS)
	@cd python && ../$(STAGE) mypy $(VENV)/bin/mypy

.PHONY: trace-said
trace-said:
	@[ -n "$${KVAGENT_CONVERSATION_TRACE:-}" ] || [ -e ../shared/traces/conversation_trace.jsonl ] || \
		echo '!!!! no conversation trace (scripts/env trace gets it): the tests of policies that need it' \
		'are LEFT OUT' >&2

.PHONY: test-go
test-go: trace-said ## Go tests with -short and the race detector; those of policies, pure functions, without it
	@$(ENV) packages go servers
	@$(STAGE) servers $(ENV) servers
	@PATH="$$($(ENV) servers):$$PATH" KVAGENT_REQUIRE_SERVERS=1 $(STAGE) -v go-test \
		scripts/gotest "$$(go list ./... | grep -v /pool/evict | xargs)" -short $(GO_TEST_FLAGS)
	@$(STAGE) -v go-test-pure scripts/gotest ./pool/evict/... -short $(GO_TEST_PLAIN)

.PHONY: test-long
test-long: trace-said ## Go tests that -short leaves out or shortens: tortures, several nodes, a browser, benchmarks
	@$(ENV) packages go servers browser
	@$(STAGE) servers $(ENV) servers
	@PATH="$$($(ENV) servers):$$PATH" KVAGENT_REQUIRE_SERVERS=1 $(STAGE) -v go-test-long \
		scripts/marked 'if testing\.Short\(\).* \{' $(GO_TEST_FLAGS)

# Their tests wait most, for disks, servers and processes: begun first, they wait beside all others.
SLOW_UNITS := ./pool/tier ./pool/disk ./cudaipc/mover ./agent ./ipc ./pool/redis ./pool/evict

.PHONY: test-go-units
test-go-units: trace-said # without those that start whole agents, those that are long, and the race detector
	@$(STAGE) -v go-test-units go test -short $(GO_TEST_PLAIN) -p 4 \
		$$(go list $(SLOW_UNITS) ./... | grep -vE '/(cmd|lab)/' | awk '!listed[$$0]++')

.PHONY: test-figures
test-figures: trace-said ## Go tests that measure hits, rates and times, without the race detector; nothing else may run
	@$(ENV) packages go servers
	@$(STAGE) servers $(ENV) servers
	@PATH="$$($(ENV) servers):$$PATH" KVAGENT_REQUIRE_SERVERS=1 $(STAGE) -v go-test-figures \
		scripts/marked 'figures\(t\)' -count=1 $(GO_TEST_PLAIN) -p 1

# Only builds with the tag softcuda load the software driver that KVAGENT_LIBCUDA names.
SOFTCUDA := $(CURDIR)/build/softcuda/libcuda.so.1

.PHONY: build-softcuda
build-softcuda: # bin/softcuda/, both programs for tests of the CUDA path without a GPU
	@$(STAGE) build-softcuda $(subst -tags cuda,-tags cuda$(comma)softcuda,$(GO_BUILD)) -o bin/softcuda/ \
		./cmd/kvagent ./cmd/kvbench

.PHONY: proof
proof: build ## prove the CUDA path on this machine's GPU: docs/GPU.md
	@bin/kvagent proof

.PHONY: softcuda
softcuda: # build/softcuda/libcuda.so.1, the driver for tests of the CUDA path
	@$(STAGE) softcuda cudaipc/testdata/softcuda/build build/softcuda

.PHONY: test-softcuda
test-softcuda: ## the software driver's own test, under the address and undefined-behaviour sanitizers
	@$(STAGE) test-softcuda cudaipc/testdata/softcuda/selftest-build $(CURDIR)/build/softcuda-asan

.PHONY: cuda-header-check
cuda-header-check: ## check third_party/cuda with NVIDIA's headers (6 MB once)
	@$(ENV) packages go python
	@$(STAGE) cuda-headers $(ENV) cuda-headers
	@$(STAGE) -v cuda-header-check scripts/cuda-header-check

WITH_SOFTCUDA := env KVAGENT_LIBCUDA=$(SOFTCUDA)
CUDA_TAGS     := -tags cuda,softcuda

.PHONY: test-cuda-smoke
test-cuda-smoke: softcuda # one walk of blocks through the CUDA path, on the software driver
	@$(STAGE) -v test-cuda-smoke $(WITH_SOFTCUDA) \
		scripts/gotest ./cudaipc/cuda -run '^TestCUDADevice$$' $(CUDA_TAGS) $(GO_TEST_PLAIN)

.PHONY: test-cuda
test-cuda: softcuda ## the CUDA path on a software driver, mostly with the race detector
	@$(STAGE) -v test-cuda $(WITH_SOFTCUDA) \
		scripts/gotest ./cudaipc/... -count=1 -run CUDA $(CUDA_TAGS) $(GO_TEST_FLAGS)
	@$(STAGE) -v test-cuda-fire $(WITH_SOFTCUDA) SOFTCUDA_EVENTS_ON_DEATH=fire SOFTCUDA_DRIVER_VERSION=13000 \
		scripts/gotest ./cudaipc/... -count=1 -run CUDA $(CUDA_TAGS) $(GO_TEST_PLAIN)
	@$(STAGE) -v test-cuda-sample $(WITH_SOFTCUDA) \
		scripts/gotest ./transfer -count=1 -run CUDA $(CUDA_TAGS) $(GO_TEST_FLAGS)
	@$(STAGE) -v test-cuda-path $(WITH_SOFTCUDA) \
		scripts/gotest ./cmd/kvagent -count=1 -run TestCUDA $(CUDA_TAGS) $(GO_TEST_PLAIN)

.PHONY: test-python
test-python: build ## Python tests, with the real agent
	@$(ENV) packages python
	@$(STAGE) venv $(ENV) tools
	@cd python && KVAGENT_REQUIRE_AGENT=1 ../$(STAGE) -v pytest $(VENV)/bin/pytest

.PHONY: test-python-units
test-python-units: # without those that need an agent
	@cd python && ../$(STAGE) pytest-units env KVAGENT_BINARY=/nonexistent $(VENV)/bin/pytest

# The oldest supported vLLM, and the one between it and the locked one.
VLLM_OLDEST  := 0.31.0
VLLM_BETWEEN := 0.32.0
WITH_VLLM    := [ "$${KVAGENT_SKIP_VLLM:-0}" = 1 ] ||

.PHONY: vllm-early
vllm-early: # starts to install the environment with vLLM while other stages run; those that need it wait
	@mkdir -p build/log
	@{ $(WITH_VLLM) nice -n 19 $(ENV) vllm-serve; } >build/log/vllm-early.log 2>&1 </dev/null &

.PHONY: test-vllm
test-vllm: build ## the vLLM connector under the locked vLLM (1 GB of download the first time; KVAGENT_SKIP_VLLM=1)
	@$(ENV) packages python servers
	@$(STAGE) venv $(ENV) tools
	@$(WITH_VLLM) $(STAGE) -v vllm-venv $(ENV) vllm
	@$(WITH_VLLM) $(STAGE) -v vllm-serve-venv $(ENV) vllm-serve
	@$(WITH_VLLM) $(STAGE) -v dynamo-venv $(ENV) dynamo
	@$(STAGE) -v test-vllm scripts/test-vllm

.PHONY: test-vllm-short
test-vllm-short: build ## the shortest run that shows the connector at work: schedulers, an engine, a vllm serve pair
	@$(ENV) packages python
	@$(STAGE) venv $(ENV) tools
	@$(WITH_VLLM) $(STAGE) -v vllm-venv $(ENV) vllm
	@$(WITH_VLLM) $(STAGE) -v vllm-serve-venv $(ENV) vllm-serve
	@ONLY=short $(STAGE) -v test-vllm-short scripts/test-vllm

.PHONY: test-vllm-oldest
test-vllm-oldest: build ## the same under the oldest supported vLLM; only one engine, cold and warm
	@$(ENV) packages python servers
	@$(STAGE) venv $(ENV) tools
	@$(WITH_VLLM) $(STAGE) -v vllm-venv-$(VLLM_OLDEST) $(ENV) vllm $(VLLM_OLDEST)
	@$(STAGE) -v test-vllm-$(VLLM_OLDEST) scripts/test-vllm $(VLLM_OLDEST)

.PHONY: test-vllm-between
test-vllm-between: build ## the same under the version between the oldest and the locked one
	@$(STAGE) -v test-vllm-$(VLLM_BETWEEN) $(FLAKY) scripts/test-vllm $(VLLM_BETWEEN)

.PHONY: test-vllm-identity
test-vllm-identity: build ## what counts as identity, of every field of the version between
	@ONLY=identity $(STAGE) -v test-vllm-identity-$(VLLM_BETWEEN) scripts/test-vllm $(VLLM_BETWEEN)

.PHONY: mutants-vllm
mutants-vllm: build ## break the connector in known ways and check that its tests fail
	@$(STAGE) -v mutants-vllm scripts/mutants vllm

.PHONY: fuzz
fuzz: ## every Fuzz target FUZZTIME (default 5000x: times; 500x with servers) each
	@$(ENV) packages go servers
	@$(STAGE) servers $(ENV) servers
	@PATH="$$($(ENV) servers):$$PATH" $(STAGE) -v fuzz scripts/fuzz $(FUZZTIME)

.PHONY: torture-short
torture-short: build
	@$(STAGE) -v torture-short scripts/torture short

.PHONY: torture-tiers-short
torture-tiers-short: build
	@$(ENV) packages servers
	@$(STAGE) servers $(ENV) servers
	@PATH="$$($(ENV) servers):$$PATH" $(STAGE) -v torture-tiers-short scripts/torture tiers-short

.PHONY: torture-nodes-short
torture-nodes-short: build # kills and pauses everything on 2 and 3 nodes over Redis, S3 and Mooncake
	@$(ENV) packages servers
	@$(STAGE) servers $(ENV) servers
	@PATH="$$($(ENV) servers):$$PATH" $(STAGE) -v torture-nodes-short scripts/torture nodes-short

.PHONY: torture-cuda-short
torture-cuda-short: build-softcuda softcuda
	@$(STAGE) -v torture-cuda-short scripts/torture cuda-short
	@$(STAGE) -v torture-cuda-short-fire scripts/torture cuda-short-fire

.PHONY: torture
torture: build ## long runs with kills, pauses and many engines (hours; TRACE= names the full trace)
	@$(ENV) packages servers
	@$(STAGE) servers $(ENV) servers
	@$(STAGE) -v torture scripts/torture long $(TRACE)
	@PATH="$$($(ENV) servers):$$PATH" $(STAGE) -v torture-nodes scripts/torture nodes $(TRACE)
	@$(STAGE) -v soak scripts/torture soak $(TRACE)

.PHONY: bench-policy
bench-policy: build ## hit rates of the eviction policies on TRACE and generated workloads (minutes)
	@$(STAGE) -v bench-policy bin/kvbench bench policy --trace $(TRACE) --workload all \
		--capacity-blocks 1000,3000,10000,30000,100000

.PHONY: bench-policy-long
bench-policy-long: ## the bounds of hit rates, at more capacities (minutes)
	@KVAGENT_POLICY_FULL=1 $(STAGE) -v bench-policy-long \
		go test ./pool/evict/evictsim -count=1 -timeout 60m -v -run 'TestTraces|TestReferences|TestNotBelowLRU'

.PHONY: mutants
mutants: ## apply each patch of testdata/mutants in a copy and check that its test fails
	@$(STAGE) -v mutants scripts/mutants go

.PHONY: dockerfile-check
dockerfile-check: ## check the Dockerfile as far as possible without a container engine
	@$(STAGE) dockerfile $(RELEASETEST)/test_dockerfile.py

# A module of its own: Helm's library and Kubernetes' types are no part of the product's go.mod.
.PHONY: test-chart
test-chart: build ## the Helm chart: lint, renderings, and the real agent started with each, also in pods of namespaces
	@$(STAGE) chart-modules $(ENV) modules deploy/charttest
	@cd deploy/charttest && ../../$(STAGE) chart-vet go vet -trimpath ./...
	@cd deploy/charttest && ../../$(STAGE) test-chart \
		../../scripts/gotest ./... -trimpath -vet=off -count=1 -timeout 5m
	@grep 'LEFT OUT' build/log/test-chart.log >&2 || true

.PHONY: test-mixin
test-mixin: build ## alerts, rules and dashboards: each expression against the metrics of the real agent
	@$(STAGE) mixin-modules $(ENV) modules deploy/mixintest
	@cd deploy/mixintest && ../../$(STAGE) mixin-vet go vet -trimpath ./...
	@cd deploy/mixintest && ../../$(STAGE) test-mixin \
		../../scripts/gotest ./... -trimpath -vet=off -count=1 -timeout 5m

# ---- Wheels with the agent, for the platforms in ARCHS. zig's compiler builds for glibc 2.28 and
# both processors, on any Linux.

ARCHS ?= $(shell go env GOARCH)
# Stripped, and the same bytes from any folder.
COMMIT     := $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
GO_RELEASE := go build -tags cuda -trimpath -buildvcs=false \
	-ldflags '-s -w -buildid= -extldflags=-Wl,-s -X main.version=$(VERSION) -X main.commit=$(COMMIT)'
ZIG_TARGET  = $(subst amd64,x86_64,$(subst arm64,aarch64,$*))-linux-gnu.2.28

.PHONY: wheel
wheel: ## dist/kvagent-*.whl, connector, client and agent; ARCHS="amd64 arm64": for both platforms
	@$(ENV) packages go python
	@$(STAGE) venv $(ENV) tools
	@$(STAGE) wheel-venv $(ENV) wheel
	@rm -f dist/kvagent-*.whl
	@$(MAKE) --no-print-directory $(addprefix wheel-,$(ARCHS))
	@ls dist/*.whl

wheel-%: program-%
	@$(STAGE) $@ env KVAGENT_VERSION='$(VERSION)' KVAGENT_PROGRAM=$(CURDIR)/build/release/$*/kvagent \
		$(VENV)/bin/python -m build --no-isolation --wheel --outdir dist python

program-%:
	@$(STAGE) $@ env CGO_ENABLED=1 GOARCH=$* CC="$(CURDIR)/scripts/zig-cc $$($(ENV) wheel) $(ZIG_TARGET)" \
		$(GO_RELEASE) -o build/release/$*/ ./cmd/kvagent

RELEASETEST = $(VENV)/bin/pytest -q -rs -p no:cacheprovider -c /dev/null deploy/releasetest

.PHONY: test-wheel
test-wheel: ARCHS = amd64 arm64
test-wheel: build wheel ## both wheels, installed from an empty folder in each Python from 3.10 on; arm64 under qemu
	@$(STAGE) -v test-wheel $(RELEASETEST)/test_wheel.py

# As program-%, of the lab.
kvbench-%:
	@$(STAGE) $@ env CGO_ENABLED=1 GOARCH=$* CC="$(CURDIR)/scripts/zig-cc $$($(ENV) wheel) $(ZIG_TARGET)" \
		$(GO_RELEASE) -o build/release/$*/ ./cmd/kvbench

GPU_KIT := dist/kvagent-gpu-kit.tar.gz

.PHONY: gpu-kit
gpu-kit: ARCHS := $(shell go env GOARCH)
gpu-kit: wheel ## dist/kvagent-gpu-kit.tar.gz: what measures on a GPU with vLLM, in nine minutes: docs/GPU.md
	@$(MAKE) --no-print-directory kvbench-$(ARCHS)
	@$(STAGE) -v gpu-kit scripts/gpu-kit dist/kvagent-*.whl build/release/$(ARCHS)/kvbench $(GPU_KIT)

.PHONY: test-gpu-kit
test-gpu-kit: gpu-kit build-softcuda softcuda ## the GPU kit on processors, all of its parts; after `make try`
	@$(STAGE) -v test-gpu-kit scripts/test-gpu-kit $(GPU_KIT)

RELEASE_KEY ?=# private key for ssh-keygen -Y sign; none: no signature
EPOCH       := $(shell git log -1 --format=%ct 2>/dev/null || echo 0)

.PHONY: release
release: ARCHS = amd64 arm64
release: wheel ## dist/release: wheels, programs, image, chart, SBOM, checksums, signature: docs/RELEASING.md
	@$(ENV) packages arm64 release
	@$(STAGE) release scripts/release '$(VERSION)' $(EPOCH) '$(RELEASE_KEY)'
	@ls -l dist/release

.PHONY: test-release
test-release: release ## the release: the image starts, arm64 under qemu; checksums, signature, SBOM, same bytes again
	@$(STAGE) -v test-release $(RELEASETEST)/test_release.py

.PHONY: clean
clean: ## remove what was built
	rm -rf bin build dist python/build python/dist
