# Functions for steps that run in a guest. Source it.

# listens PORT: something listens there.
listens() { grep -qE ":$(printf '%04X' "$1") 0+:0000 0A" /proc/net/tcp /proc/net/tcp6; }

# listening PORT: wait until something does.
listening() { eventually listens "$1"; }

# pair PORT PROGRAM ARGS...: run PROGRAM as server and as client, on PORT. Fails
# unless both succeed; prints both outputs.
pair() {
	local port=$1 dir status=0
	shift
	dir=$(mktemp -d)
	"$@" -p "$port" > "$dir/server" 2>&1 &
	local server=$!
	listening "$port" || status=1
	"$@" -p "$port" 127.0.0.1 > "$dir/client" 2>&1 || status=1
	# A client that failed may leave its server waiting for it.
	[ $status = 0 ] || kill "$server" 2> /dev/null || true
	wait "$server" || status=1
	sed 's/^/server: /' "$dir/server"
	sed 's/^/client: /' "$dir/client"
	rm -r "$dir"
	return $status
}

# pingpong PORT PROGRAM ARGS...: pair, and both ends print their rate.
pingpong() {
	local out
	out=$(pair "$@") || { echo "$out"; return 1; }
	echo "$out" | grep 'usec/iter'
	[ "$(echo "$out" | grep -c 'usec/iter')" = 2 ]
}

# perftest PORT ROW PROGRAM ARGS...: pair, and the client's report has a line
# that begins with ROW. The programs first fit their clock to the processor's
# counter and end with "Can't produce a report" where that fit is poor, as it is
# for one run in eight on an emulated processor, whichever end fails: those are run
# again.
perftest() {
	local port=$1 row=$2 out i
	shift 2
	for i in $(seq 12); do
		out=$(pair "$port" "$@") && { grep -E "^client: +$row" <<< "$out" && return; break; }
		grep -Eq "^(client|server): Correlation coefficient .* < " <<< "$out" || break
	done
	echo "$out"
	return 1
}

# perftest_says MESSAGE PORT ROW PROGRAM ARGS...: perftest, and an end says MESSAGE.
perftest_says() {
	local says=$1 port=$2 row=$3 out i
	shift 3
	for i in $(seq 12); do
		out=$(pair "$port" "$@") && break
		grep -Eq "^(client|server): Correlation coefficient .* < " <<< "$out" || break
	done
	grep -F "$says" <<< "$out" && grep -E "^client: +$row" <<< "$out" && return
	echo "$out"
	return 1
}

# refused PORT MESSAGE PROGRAM ARGS...: the program, on its own, fails at once and
# says MESSAGE.
refused() {
	local port=$1 says=$2 out status=0
	shift 2
	out=$(timeout 20 "$@" -p "$port" 2>&1) || status=$?
	grep -F "$says" <<< "$out" && [ $status != 0 ] && [ $status != 124 ] && return
	echo "exit status $status, $out"
	return 1
}

# refused_by_device PORT MESSAGE PROGRAM ARGS...: a pair of it fails, and says MESSAGE.
refused_by_device() {
	local port=$1 says=$2 out status=0
	shift 2
	out=$(pair "$port" "$@") || status=$?
	grep -F "$says" <<< "$out" && [ $status != 0 ] && return
	echo "exit status $status, $out"
	return 1
}

# contexts: how many contexts the daemon says are open.
contexts() { "$UVERBSD" status --json | grep -o '"pid":[0-9]*' | wc -l; }

# eventually COMMAND...: until it succeeds, at most 20 s.
eventually() {
	for _ in $(seq 400); do
		"$@" && return 0
		sleep 0.05
	done
	echo "never true: $*" >&2
	return 1
}

# to_kernel: the daemon goes, the kernel's rdma_rxe comes, over a device that
# has an address to route to.
to_kernel() {
	local pid=${UVERBSD_PID-}
	[ -z "$pid" ] || kill -TERM "$pid"
	daemon_gone() { [ -z "$pid" ] || [ ! -e "/proc/$pid" ] && [ ! -e /run/modprobe.d/uverbsd.conf ]; }
	eventually daemon_gone
	modprobe rdma_rxe
	# The module makes dummy0 itself in some releases.
	modprobe dummy
	[ -e /sys/class/net/dummy0 ] || ip link add dummy0 type dummy
	ip addr add 10.9.9.9/24 dev dummy0
	ip link set dummy0 up
	rdma link add rxe0 type rxe netdev dummy0
	eventually test -c /dev/infiniband/uverbs0
}
