#!/bin/bash
# What it costs to make and destroy an object, on the daemon and then, in the
# same boot, on the kernel's rdma_rxe. LIVE: how many of the kind exist meanwhile.
set -eu
. /opt/lib.sh
LIVE=${LIVE:-10,1000,10000}
# Of rdma_rxe's regions only so many fit into the default memlock limit.
ulimit -l unlimited
ours=$(/opt/raw bench -live "$LIVE")
to_kernel
theirs=$(/opt/raw bench -live "$LIVE")
uname -r
paste -d ' ' <(echo "$ours") <(echo "$theirs") | awk '{
	printf "%s, %d live: daemon %.1f us (best %.1f), rdma_rxe %.1f us (best %.1f); ours per second / theirs %.3f (best %.3f)\n",
		$1, $3, $4, $7, $12, $15, $12 / $4, $15 / $7 }'
