#!/bin/bash
# Every form of every command, first to the daemon, then, in the same boot, to
# the kernel's rdma_rxe, as root and as an ordinary user; then the two side by
# side. Lines go to /tmp/walk.*.
set -eu
. /opt/lib.sh

as() { if [ "$1" = root ]; then "${@:2}"; else setpriv --reuid="$1" --regid="$1" --clear-groups "${@:2}"; fi; }

status=0
for user in root tester; do
	as $user /opt/raw walk > /tmp/walk.daemon.$user 2> /tmp/err || status=1
	sed "s/^/daemon, $user: /" /tmp/err
done
to_kernel
for user in root tester; do
	as $user /opt/raw walk -oracle-kernel > /tmp/walk.kernel.$user 2> /tmp/err || status=1
	sed "s/^/kernel, $user: /" /tmp/err
	/opt/raw compare /tmp/walk.daemon.$user /tmp/walk.kernel.$user || status=1
done
exit $status
