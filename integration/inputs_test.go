//go:build guest

package integration_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/uverbsd/uverbsd/integration/guest"
)

// inputs are small inputs from public reports that whole programs make.
var inputs = []struct{ name, user, script string }{
	{"write_lat of 1025 bytes", "tester", `perftest 20801 '1025 +5' ib_write_lat -d qib0 -s 1025 -n 5`},
	{"write_lat around MTUs", "tester", `
		for size in 1023 1024 2047 2049 4097; do
			perftest 20802 "$size +5" ib_write_lat -d qib0 -m 1024 -s $size -n 5
		done`},
	{"send_lat around MTUs", "tester", `
		for size in 1023 1025 2048 2049; do
			perftest 20803 "$size +5" ib_send_lat -d qib0 -m 1024 -s $size -n 5
		done`},
	{"ud_pingpong checks what lies at offset 40", "tester", `pingpong 20804 ibv_ud_pingpong -d qib0 -n 50 -c`},
	{"ud_pingpong checks its largest message", "tester", `pingpong 20805 ibv_ud_pingpong -d qib0 -n 50 -c -s 2048`},
	{"100 KiB under a limit of 64 KiB", "tester", `
		refused() {
			local out
			out=$( (ulimit -S -l 64; timeout 20 ibv_rc_pingpong -d qib0 -p 20806 -s 102400 -n 1) 2>&1) && return 1
			echo "$out"
			grep -q "Couldn't register MR" <<< "$out"
		}
		refused
		(ulimit -S -l 256; pingpong 20807 ibv_rc_pingpong -d qib0 -s 102400 -n 20 -c)
		refused
		eventually test "$(contexts)" = 0`},
	{"sysfs entry present, node absent", "", `
		two() { [ "$(ibv_devices | grep -c qib)" = 2 ]; }
		eventually two
		numbers=$(stat -c '0x%t 0x%T' /dev/infiniband/uverbs1)
		rm /dev/infiniband/uverbs1
		status=0
		test -e /sys/class/infiniband_verbs/uverbs1/ibdev || status=1
		ibv_devinfo -d qib0 | grep PORT_ACTIVE || status=1
		timeout 20 ibv_devinfo -d qib1 && status=1
		[ $? = 124 ] && status=1
		pingpong 20808 ibv_rc_pingpong -d qib0 -n 50 -c || status=1
		mknod -m 666 /dev/infiniband/uverbs1 c $numbers
		ibv_devinfo -d qib1 | grep PORT_ACTIVE || status=1
		pingpong 20809 ibv_rc_pingpong -d qib1 -n 50 -c || status=1
		exit $status`},
}

// twoDevices is a daemon's configuration.
const twoDevices = `
[[device]]
name = "qib0"
guid = "0011:7500:0000:0001"
[[device]]
name = "qib1"
guid = "0011:7500:0000:0002"
`

func TestSmallInput(t *testing.T) {
	conf := filepath.Join(t.TempDir(), "two.toml")
	if err := os.WriteFile(conf, []byte(twoDevices), 0o644); err != nil {
		t.Fatal(err)
	}
	cfg := guest.Config{
		DaemonArgs: []string{"serve", "--config", "/opt/two.toml"},
		Files:      []guest.File{{Host: conf, Guest: "/opt/two.toml", Perm: 0o644}},
	}
	forEachRelease(t, cfg, func(t *testing.T, g *bootedGuest) {
		for _, in := range inputs {
			t.Run(in.name, func(t *testing.T) { t.Logf("%s", g.step(t, in.user, in.script)) })
		}
	})
}
