# What each target is for stands in README.md. Needs Go and, for guests, the
# packages of integration/apt-packages, which `make deps` installs.

GUEST    ?= trixie
SCRIPT   ?= integration/scripts/demo.sh
PACKAGES ?=
DAEMON   ?= yes
GUESTFLAGS ?=
# The raw client knows the write() path only.
QIB := -config integration/scripts/qib.toml

BIN := build/uverbsd
VERSION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)

.PHONY: all build deps check test guest-test guest demo bench-roundtrip bench-objects mapped-cost oracle pyverbs-list perftest soak bench gobench races fuzz lint clean FORCE

all: build

# Static: the guest, and any host, needs nothing but the kernel.
build:
	CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o $(BIN) ./cmd/uverbsd

deps:
	@missing=$$(for p in $$(cat integration/apt-packages); do dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'install ok installed' || echo $$p; done); \
	if [ -n "$$missing" ]; then echo "installing: $$missing"; apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; fi

# The part without guests.
check:
	@bad=$$(gofmt -l $$(git ls-files '*.go' 2>/dev/null || find . -name '*.go')); if [ -n "$$bad" ]; then echo "gofmt would change:"; echo "$$bad"; exit 1; fi
	go vet ./...
	go vet -tags guest ./integration/...
	go test -race ./...
	# They count allocations, and the race detector makes some of its own.
	go test -run 'NoAlloc|TestChurnIsFlat' ./cuse ./hca/soft ./hca/provider/rxe

test: deps check guest-test

# Behaviour, in both releases. A guest that does not boot is a failure. -p 1: one
# guest at a time is enough for two cores; images first, so that go test's own
# limit is for the tests.
guest-test: deps build build/guest-run
	build/guest-run -guest bookworm -prepare
	build/guest-run -guest trixie -prepare
	go test -tags guest -count=1 -p 1 -timeout 75m ./integration/...

# Not `go run`: that turns every status into 1 and keeps SIGTERM to itself.
build/guest-run: FORCE
	@go build -o $@ ./integration/cmd/guest

guest: deps build build/guest-run
	@build/guest-run -guest $(GUEST) -script $(SCRIPT) -packages "$(PACKAGES)" -daemon=$(DAEMON) $(GUESTFLAGS)

demo: deps build build/guest-run
	@build/guest-run -guest $(GUEST) -script integration/scripts/demo.sh

bench-roundtrip: deps build build/guest-run
	CGO_ENABLED=0 go build -trimpath -o build/roundtrip ./integration/roundtrip
	@build/guest-run -guest $(GUEST) -script integration/scripts/roundtrip.sh $(QIB) -file build/roundtrip:/opt/roundtrip

# Objects made and destroyed per second against the kernel's rdma_rxe, in one boot.
bench-objects: deps build build/guest-run
	CGO_ENABLED=0 go build -trimpath -o build/raw ./integration/raw
	@build/guest-run -guest $(GUEST) -script integration/scripts/objects.sh $(QIB) -file build/raw:/opt/raw -file integration/scripts/lib.sh:/opt/lib.sh

# What many contexts with mapped queues cost the daemon: memory, and CPU when idle.
mapped-cost: deps build build/guest-run
	CGO_ENABLED=0 go build -trimpath -o build/raw ./integration/raw
	@build/guest-run -guest trixie -script integration/scripts/mappedcost.sh -file build/raw:/opt/raw -file integration/scripts/lib.sh:/opt/lib.sh

# Every command's forms, to the daemon and to the kernel's rdma_rxe as the oracle.
oracle: deps build build/guest-run
	CGO_ENABLED=0 go build -trimpath -o build/raw ./integration/raw
	@build/guest-run -guest $(GUEST) -script integration/scripts/oracle.sh $(QIB) -file build/raw:/opt/raw -file integration/scripts/lib.sh:/opt/lib.sh

# What rdma-core's own suite does, written anew: look at the difference.
pyverbs-list: deps build build/guest-run
	go test -tags guest -count=1 -timeout 60m -run 'TestPyverbs' ./integration -pyverbs-list

# The whole of perftest's matrix in both releases; `make test` runs each row in one.
perftest: deps build build/guest-run
	go test -tags guest -count=1 -timeout 60m -run 'TestPerftest|TestMapped' ./integration -perftest-all

# Its own daemon, with limits (soak.sh). The guest's time limit is five minutes
# more than the soak: a Go duration is a sum, so 10m5m is fifteen minutes.
SOAK ?= 10m
soak: deps build build/guest-run
	CGO_ENABLED=0 go build -trimpath -o build/soak ./integration/soak
	@echo 'SOAK=$(SOAK)' > build/soak.env
	@build/guest-run -guest $(GUEST) -script integration/scripts/soak.sh -daemon=no -timeout $(SOAK)5m \
		-file $(BIN):/opt/uverbsd -file build/soak:/opt/soak -file build/soak.env:/opt/soak.env -file integration/scripts/lib.sh:/opt/lib.sh

# Unmodified programs over the daemon and then over the kernel's rdma_rxe, in one
# boot: a table of ratios, and build/bench.json. BENCH: what to set in bench.sh.
# Idle processors poll: to wake a halted one takes the emulator 100 us and more, which
# would drown what is measured (pipe ping-pong between two processors: 250 us, or 50).
BENCH ?=
BENCH_KERNEL ?= idle=poll
bench: deps build build/guest-run
	CGO_ENABLED=0 go build -trimpath -o build/roundtrip ./integration/roundtrip
	@echo '$(BENCH)' > build/bench.env
	@build/guest-run -guest trixie -script integration/scripts/bench.sh -daemon=no -timeout 20m -append "$(BENCH_KERNEL)" \
		-file $(BIN):/opt/uverbsd -file build/roundtrip:/opt/roundtrip -file build/bench.env:/opt/bench.env \
		-file integration/scripts/lib.sh:/opt/lib.sh > build/bench.log; status=$$?; \
	grep -v '^JSON ' build/bench.log; sed -n 's/^JSON //p' build/bench.log > build/bench.json; exit $$status

# Go's own benchmarks.
gobench:
	go test -run '^$$' -bench . -benchmem ./...

# Failure class 11 in full: destroy in the windows of retransmission and RNR, 10^5
# times each under the race detector; `make check` does 300.
ROUNDS ?= 100000
races:
	go test -race -count=1 -timeout 90m -v -run 'Device/Row11' ./hca/soft -args -hcatest.rounds $(ROUNDS)

# Go's own way to shrink what it finds interesting takes most of the time where
# goroutines make coverage differ from run to run: bounded.
FUZZTIME ?= 10m
fuzz:
	@mkdir -p build; for f in ./cuse:FuzzMessage ./dispatch:FuzzCommand ./dispatch:FuzzSequence; do \
		echo "$$f"; \
		go test -run '^$$' -fuzz "$${f#*:}\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x "$${f%%:*}" > build/fuzz.log 2>&1 || { tail -20 build/fuzz.log; exit 1; }; \
		tail -3 build/fuzz.log; done

lint:
	go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2 run ./...

clean:
	rm -rf build

FORCE:
