//go:build guest

package integration_test

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/uverbsd/uverbsd/integration/guest"
)

// hotplugSteps are run one after the other, as root, with one daemon.
var hotplugSteps = []struct{ name, script string }{
	// Clients of every sort are at work when their device goes: each is told, ends
	// with an error, and none hangs.
	{"remove in traffic", `
		as() { su tester -s /bin/bash -c "exec $*"; }
		as ibv_asyncwatch -d qib0 > watch 2>&1 & watch=$!
		for p in "20701" "20702 -e"; do
			as ibv_rc_pingpong -d qib0 -n 10000000 -p $p > "server$p" 2>&1 & ends="${ends-} $!"
			listening ${p% -e}
			as ibv_rc_pingpong -d qib0 -n 10000000 -p $p 127.0.0.1 > "client$p" 2>&1 & ends="$ends $!"
		done
		connected() {
			[ $("$UVERBSD" status --json | grep -o '"qp":1' | wc -l) = 4 ] && [ $(contexts) = 5 ] && ! listens 20701 && ! listens 20702
		}
		eventually connected
		eventually grep -q 'async event FD' watch
		timeout 20 "$UVERBSD" device remove qib0 | tee said
		grep '^qib0 is removed' said
		[ ! -e /dev/infiniband/uverbs0 ]
		[ ! -e /sys/class/infiniband/qib0 ] && [ ! -e /sys/class/infiniband_verbs/uverbs0 ]
		[ "$(ibv_devices | grep -c qib)" = 0 ]
		gone() { for p in $ends; do [ ! -e /proc/$p ] || [ "$(cut -d' ' -f3 /proc/$p/stat)" = Z ] || return 1; done; }
		eventually gone
		for p in $ends; do s=0; wait $p || s=$?; [ $s != 0 ]; [ $s -lt 128 ]; done
		grep . server* client*
		eventually grep -E 'event_type .*\(8\)' watch
		"$UVERBSD" status | tee status
		grep '^qib0[[:space:]]removed, 1 contexts$' status
		pkill ibv_asyncwatch
		wait $watch || true
		none() { [ -z "$("$UVERBSD" status)" ]; }
		eventually none`},
	{"only root", `
		! su tester -s /bin/bash -c "$UVERBSD device add qib5" > said 2>&1
		cat said
		grep 'run as root' said
		[ $(wc -l < said) = 1 ]`},
	{"refusals", `
		refused() { ! "$UVERBSD" device "$@" > said 2>&1; cat said; [ $(wc -l < said) = 1 ]; }
		refused remove qib0; grep 'none of that name' said
		"$UVERBSD" device add qib1
		refused add qib1; grep 'choose another' said
		refused add qib7 --guid 0011:7500:0000:0001; grep 'that of qib1' said`},
	{"add", `
		ibv_devices | grep qib1
		[ "$(stat -c %a /dev/infiniband/uverbs0)" = 666 ]
		cat > as_tester <<- 'end'
			#!/bin/sh
			exec su tester -s /bin/bash -c "exec ibv_rc_pingpong -d qib1 -n 200 $*"
		end
		chmod +x as_tester
		pingpong 20703 ./as_tester
		"$UVERBSD" device add qib2 --mode 0600
		[ "$(stat -c %a /dev/infiniband/uverbs1)" = 600 ]
		ibv_devinfo -d qib2 | grep PORT_ACTIVE
		"$UVERBSD" device remove qib2
		pingpong 20704 ibv_rc_pingpong -d qib1 -n 200 -e`},
	// A client that never closes holds up nobody, and keeps its number.
	{"a client that stands still", `
		ibv_asyncwatch -d qib1 > watch 2>&1 & watch=$!
		eventually grep -q 'async event FD' watch
		kill -STOP $watch
		timeout 20 "$UVERBSD" device remove qib1 | grep 'still open: 1 contexts'
		"$UVERBSD" device add qib1 | grep uverbs1
		"$UVERBSD" status
		pingpong 20705 ibv_rc_pingpong -d qib1 -n 200
		# Its read was interrupted by the stop, and says EINTR: it may end by itself.
		kill -CONT $watch
		kill $watch || true
		wait $watch || true
		free() { ! "$UVERBSD" status | grep removed; }
		eventually free
		"$UVERBSD" device add qib3 | grep uverbs0
		pingpong 20706 ibv_rc_pingpong -d qib3 -n 200
		for i in 1 2 3 4 5; do
			"$UVERBSD" device remove qib3
			ibv_devices | grep qib3 && exit 1
			"$UVERBSD" device add qib3
			ibv_devices | grep qib3
		done`},
}

// Devices come and go while clients use them.
func TestHotplug(t *testing.T) {
	forEachRelease(t, guest.Config{}, func(t *testing.T, g *bootedGuest) {
		for _, s := range hotplugSteps {
			if !t.Run(s.name, func(t *testing.T) {
				t.Logf("%s", g.step(t, "", "cd \"$(mktemp -d)\"; chmod 755 .\n"+s.script))
			}) {
				return
			}
		}
		t.Run("stop", func(t *testing.T) { testStopWithRemoved(t, g) })
	})
}

// SIGTERM while a removed device has a client that stands still.
func testStopWithRemoved(t *testing.T, g *bootedGuest) {
	ctx := context.Background()
	watch, err := g.vm.Go(guest.Command{Script: "exec ibv_asyncwatch -d qib1", User: "tester", Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	g.step(t, "", `
		opened() { [ $(contexts) = 1 ]; }
		eventually opened
		pkill -STOP ibv_asyncwatch
		"$UVERBSD" device remove qib1`)
	exit, err := g.vm.StopDaemon(ctx, syscall.SIGTERM, 20*time.Second)
	if err != nil || exit.Code != 0 || exit.TimedOut {
		t.Errorf("stop: %+v, %v", exit, err)
	}
	g.hostIsClean(t)
	g.step(t, "", `[ -z "$(ls /dev/infiniband 2> /dev/null)" ] && [ ! -e /run/uverbsd/control.sock ]; pkill -CONT ibv_asyncwatch`)
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if res, err := watch.Wait(ctx); err != nil {
		t.Errorf("the client hangs: %v\n%s", err, res.Output)
	}
}
