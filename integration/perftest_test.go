//go:build guest

package integration_test

import (
	"flag"
	"fmt"
	"testing"

	"github.com/uverbsd/uverbsd/integration/guest"
)

// wholeMatrix runs every row in every release; without it a row runs in one of
// them, in turns, which is half of what it takes.
var wholeMatrix = flag.Bool("perftest-all", false, "TestPerftest: every row in each release")

// largest is the last line of a report over all sizes (-a): 2 bytes to 8 MiB.
const largest = "8388608 +5"

// perftests is perftest's matrix: row is how the last line of the client's report
// begins, the message's bytes and the iterations. Five iterations are the fewest
// that the programs take (MIN_ITER). -a runs 23 sizes over one connection, and fits the clock anew for
// each, which is most of what it takes here: one program does it, the others take
// the sizes at its end. None of them can compare data in these releases (4.5 and 25.01;
// --data_validation came later): checkedSizes do that.
var perftests = []struct{ args, row string }{
	{"ib_write_bw -a -n 5", largest},
	{"ib_send_bw -s 8388608 -n 5", largest},
	{"ib_read_bw -s 8388608 -n 5", largest},
	{"ib_write_lat -s 8388608 -n 5", largest},
	{"ib_write_bw -c UC -s 8388608 -n 5", largest},
	{"ib_send_lat -s 1048577 -n 5", "1048577 +5"},
	{"ib_read_lat -s 1048577 -n 5", "1048577 +5"},
	{"ib_send_bw -c UC -s 1048577 -n 5", "1048577 +5"},
	{"ib_write_lat -c UC -s 1048577 -n 5", "1048577 +5"},

	{"ib_atomic_bw -n 20", "8 +20"},
	{"ib_atomic_bw -A CMP_AND_SWAP -n 20", "8 +20"},
	{"ib_atomic_bw -A FETCH_AND_ADD -n 20", "8 +20"},
	{"ib_atomic_lat -A CMP_AND_SWAP -n 20", "8 +20"},
	{"ib_atomic_lat -A FETCH_AND_ADD -n 20", "8 +20"},

	{"ib_send_bw -e -n 20", "65536 +20"},
	{"ib_read_bw -e -n 20", "65536 +20"},
	{"ib_atomic_bw -e -n 20", "8 +20"},
	{"ib_send_lat -e -n 20", "2 +20"},
	{"ib_read_lat -e -n 20", "2 +20"},
	{"ib_atomic_lat -e -n 20", "8 +20"},
	{"ib_send_bw -c UD -e -n 20", "4096 +20"},
	{"ib_send_lat -c UD -e -n 20", "2 +20"},

	{"ib_send_bw -q 4 -n 20", "65536 +80"},
	{"ib_write_bw -q 4 -n 20", "65536 +80"},
	{"ib_read_bw -q 4 -n 20", "65536 +80"},
	{"ib_atomic_bw -q 4 -n 20", "8 +80"},
	{"ib_send_bw -c UC -q 4 -n 20", "65536 +80"},
	{"ib_send_bw -c UD -q 4 -n 20", "4096 +80"},

	{"ib_send_bw -b -n 20", "65536 +20"},
	{"ib_write_bw -b -n 20", "65536 +20"},
	{"ib_read_bw -b -n 20", "65536 +20"},
	{"ib_atomic_bw -b -n 20", "8 +20"},
	{"ib_send_bw -c UC -b -n 20", "65536 +20"},
	{"ib_send_bw -c UD -b -n 20", "4096 +20"},
	{"ib_write_bw -b -q 4 -n 20", "65536 +80"},
	{"ib_send_bw -b -e -n 20", "65536 +20"},

	{"ib_send_bw --use-srq -n 20", "65536 +20"},
	{"ib_send_bw --use-srq -q 4 -n 20", "65536 +80"},
	{"ib_send_bw --use-srq -q 4 -e -n 20", "65536 +80"},
	{"ib_send_lat --use-srq -n 20", "2 +20"},
	{"ib_send_bw --use-srq -c UD -n 20", "4096 +20"},
	{"ib_send_bw -r 8 -n 100", "65536 +100"},

	{"ib_write_lat -s 1025 -m 1024 -n 5", "1025 +5"},
	{"ib_write_lat -s 1023 -m 1024 -n 5", "1023 +5"},
	{"ib_read_lat -s 2049 -m 1024 -n 5", "2049 +5"},
	{"ib_send_lat -s 4097 -m 4096 -n 5", "4097 +5"},
	{"ib_send_lat -c UC -s 513 -m 512 -n 5", "513 +5"},
	{"ib_send_lat -c UD -s 4096 -n 5", "4096 +5"},
	{"ib_write_bw -s 257 -m 256 -t 4 -Q 2 -n 50", "257 +50"},
	{"ib_send_bw -s 2048 -t 1 -Q 1 -n 50", "2048 +50"},
	{"ib_read_bw -o 1 -n 20", "65536 +20"},
	{"ib_write_bw -l 4 -n 20", "65536 +20"},
}

// perftestsSince23 wait for ever in bookworm's perftest (4.5), with the kernel's
// rdma_rxe too, and run in later releases only. There, run_iter_bi waits for an event
// before every poll, and a poll takes at most rx_depth receives, which is never more
// than -n: 20 of the 80 here. What a poll leaves in the CQ is no reason for another
// event: rxe_req_notify_cq and rvt_req_notify_cq arm, whatever is queued. So it waits
// with completions in front of it once the last has arrived: in ten runs of ten on
// rdma_rxe in the same guest, as on qib0, and everything left in the CQ had been there
// since it was last armed. perftest 23.07 waits only after polls that found nothing
// (its commit 14955fe). With one QP a poll takes all: perftests has that row.
var perftestsSince23 = []struct{ args, row string }{
	{"ib_send_bw -b -q 4 -e -n 20", "65536 +80"},
}

// perftestNotices work, but not as asked: the program says so.
var perftestNotices = []struct{ args, row, says, why string }{
	{"ib_write_lat -I 64 -n 5", "2 +5", "Device not recognized to implement inline feature. Disabling it",
		"perftest asks for inline data only on the adapters that it knows, and QIB is none of them"},
	{"ib_send_bw -c UD -a -n 5", "4096 +5", "Max msg size in UD is MTU 4096", "a datagram is one packet"},
}

// perftestRefusals are what the programs refuse on any device, before they open it
// (perftest_parameters.c).
var perftestRefusals = []struct{ args, says, why string }{
	{"ib_read_bw -c UC", "UC connection not possible in READ/ATOMIC verbs", "UC has no reads (IBTA 1.4 table 50)"},
	{"ib_atomic_lat -c UC", "UC connection not possible in READ/ATOMIC verbs", "nor atomics"},
	{"ib_read_lat -c UD", "UD connection only possible in SEND verb", "UD has sends only"},
	{"ib_write_bw -c UD", "UD connection only possible in SEND verb", "UD has sends only"},
	{"ib_atomic_bw -c UD", "UD connection only possible in SEND verb", "UD has sends only"},
	{"ib_write_bw -e", "Events feature not available on WRITE verb", "the target of a write has no completion"},
	{"ib_write_lat -e", "Events feature not available on WRITE verb", "the target of a write has no completion"},
	{"ib_send_lat -q 4", "Multiple QPs only available on bw tests", "by design of the tool"},
	{"ib_read_lat -b", "Bidirectional is only available in BW test", "by design of the tool"},
	{"ib_read_lat -I 8", "Inline feature not available on READ/Atomic verbs", "a read sends no data"},
	{"ib_atomic_bw -s 16", "Message size cannot be changed for Atomic tests", "an atomic is eight bytes"},
	{"ib_read_bw --use-srq", "Using SRQ only avavilible in SEND tests", "nothing else takes a receive"},
	{"ib_write_bw -A FETCH_AND_ADD", "To change the atomic action type, you must run one of the atomic tests", "by design of the tool"},
	{"ib_write_bw -o 4", "Setting Outstanding reads only available on READ verb", "by design of the tool"},
}

// perftestRefusedByDevice begin, and fail on what the device or the host lacks.
var perftestRefusedByDevice = []struct{ args, says, why string }{
	{"ib_send_bw -c XRC -n 5", "Error opening XRC domain", "libipathverbs has no XRC"},
}

// checkedSizes are about the MTU, the page and the daemon's copies; ibv_*_pingpong
// -c compares every byte.
var checkedSizes = []int{1, 1023, 1024, 1025, 2049, 4095, 4097, 65535, 65537, 1 << 20}

// perftestUser runs a script as the unprivileged user, who may register the 16 MiB
// that -a takes: twice the kernel's own limit.
const perftestUser = `ulimit -l unlimited; setpriv --reuid=tester --regid=tester --clear-groups bash -euo pipefail -c '. /opt/lib.sh
%s
eventually test "$(contexts)" = 0'`

// TestPerftest runs perftest's matrix, `make perftest` all of it in both releases.
func TestPerftest(t *testing.T) {
	// The programs fit the processor's counter to the clock for every line of a
	// report. Emulated, the kernel takes the counter for unstable, and reads the
	// HPET instead, which QEMU answers too late too often.
	cfg := guest.Config{Append: []string{"tsc=reliable"}}
	forEachRelease(t, cfg, func(t *testing.T, g *bootedGuest) {
		port := 23000
		always := func(t *testing.T, args, format string, a ...any) {
			t.Run(args, func(t *testing.T) {
				script := fmt.Sprintf(format, append([]any{port}, a...)...)
				t.Logf("%s", g.step(t, "", fmt.Sprintf(perftestUser, script)))
			})
		}
		run := func(t *testing.T, args, format string, a ...any) {
			if port++; *wholeMatrix || port%len(guest.Releases) == g.release {
				always(t, args, format, a...)
			}
		}
		for _, p := range perftests {
			run(t, p.args, `perftest %d "%s" %s -d qib0`, p.row, p.args)
		}
		for _, p := range perftestNotices {
			run(t, p.args, `perftest_says "%[4]s" %[1]d "%[2]s" %[3]s -d qib0`, p.row, p.args, p.says)
		}
		for _, p := range perftestRefusals {
			run(t, p.args, `refused %d "%s" %s -d qib0`, p.says, p.args)
		}
		for _, p := range perftestRefusedByDevice {
			run(t, p.args, `refused_by_device %d "%s" %s -d qib0`, p.says, p.args)
		}
		for _, s := range checkedSizes {
			run(t, fmt.Sprintf("ibv_rc_pingpong -c -s %d", s), `pingpong %d ibv_rc_pingpong -d qib0 -n 5 -c -s %d`, s)
			run(t, fmt.Sprintf("ibv_uc_pingpong -c -s %d", s), `pingpong %d ibv_uc_pingpong -d qib0 -n 5 -c -s %d`, s)
		}
		if guest.Releases[g.release] != guest.Bookworm {
			for _, p := range perftestsSince23 {
				port++
				always(t, p.args, `perftest %d "%s" %s -d qib0`, p.row, p.args)
			}
		}
	})
}
