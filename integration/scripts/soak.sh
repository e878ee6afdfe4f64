#!/bin/bash
# Mixed load on a daemon whose users may have little more than the load needs, so
# that what is not given back runs into a limit. SOAK, in /opt/soak.env: how long.
set -eu
. /opt/lib.sh
. /opt/soak.env
cat > /tmp/soak.toml <<'END'
[[device]]
name = "qib0"
[limits.user]
contexts = 24
pd = 160
mr = 160
ah = 64
cq = 160
qp = 160
srq = 32
comp_channel = 128
queue_bytes = 16777216
pinned_bytes = 134217728
END
export UVERBSD=/opt/uverbsd UVERBSD_LOG=/tmp/soak.log
"$UVERBSD" serve --config /tmp/soak.toml > "$UVERBSD_LOG" 2>&1 &
export UVERBSD_PID=$!
eventually "$UVERBSD" status > /dev/null 2>&1
status=0
/opt/soak run -for "$SOAK" || status=1
if [ $status = 0 ]; then
	kill -TERM $UVERBSD_PID
	wait $UVERBSD_PID || status=1
else
	# With what each goroutine does.
	kill -QUIT $UVERBSD_PID
	wait $UVERBSD_PID || true
fi
[ $status = 0 ] || { echo "the daemon's log:"; grep -v '	usage	' "$UVERBSD_LOG" | tail -400; }
exit $status
