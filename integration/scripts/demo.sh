#!/bin/bash
# The demonstration, run in a guest with uverbsd serving: unmodified rdma-core
# programs on a host that has no RDMA kernel stack. Fails unless all of it works.
set -eu
say() { printf '\n### %s\n' "$*"; }

say "$(. /etc/os-release; echo "$PRETTY_NAME"), kernel $(uname -r), $(dpkg-query -W -f '${Package} ${Version}' ibverbs-providers); RDMA modules loaded: $(grep -c '^ib_' /proc/modules || true)"
say ibv_devices
ibv_devices | tee /tmp/devices
# rxe0, whose queues are mapped, where the kernel allows it; else qib0.
dev=$(awk 'NR == 3 { print $1 }' /tmp/devices)
gid=()
[ "$dev" != rxe0 ] || gid=(-g 1)
[ "$dev" = rxe0 ] || [ "$dev" = qib0 ]
say ibv_devinfo
ibv_devinfo -d "$dev" | tee /tmp/devinfo
grep -q PORT_ACTIVE /tmp/devinfo

say "ibv_rc_pingpong between two processes"
ibv_rc_pingpong -d "$dev" "${gid[@]}" -n 1000 > /tmp/server 2>&1 &
server=$!
# 18515 is 0x4853: wait until the server listens.
for _ in $(seq 200); do grep -qE ':4853 0+:0000 0A' /proc/net/tcp /proc/net/tcp6 && break; sleep 0.05; done
ibv_rc_pingpong -d "$dev" "${gid[@]}" -n 1000 127.0.0.1 > /tmp/client 2>&1 || { cat /tmp/client /tmp/server; exit 1; }
wait "$server"
echo "server:"; cat /tmp/server
echo "client:"; cat /tmp/client
grep -q 'usec/iter' /tmp/server
grep -q 'usec/iter' /tmp/client

say "uverbsd status"
"$UVERBSD" status
