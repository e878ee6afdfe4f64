#!/bin/bash
# What contexts with mapped queues cost the daemon: memory of 1,000 with ten QPs
# each, and processor time of 100 whose CQs are armed and have nothing to say.
# Fails over the bounds that are aimed at.
set -eu
. /opt/lib.sh
CONTEXTS=${CONTEXTS:-1000} QPS=${QPS:-10} DEPTH=${DEPTH:-4}
MOST_MIB=512   # of the daemon's own and of shared memory together
MOST_PERCENT=1 # of a processor
ulimit -n 16384

field() { awk -v f="$2:" '$1 == f { print $2 }' "$1"; }      # in KiB
own() { field "/proc/$UVERBSD_PID/status" RssAnon; }
shared() { field /proc/meminfo Shmem; }
descriptors() { local n=0 p; for p in $(pgrep -x uverbsd); do n=$((n + $(ls "/proc/$p/fd" | wc -l))); done; echo $n; }
ticks() { awk '{ print $14 + $15 }' "/proc/$UVERBSD_PID/stat"; }

# crowd ARGS...: a crowd that is ready, with its standard input on descriptor 5.
crowd() {
	rm -f /tmp/in /tmp/out
	mkfifo /tmp/in
	/opt/raw crowd "$@" < /tmp/in > /tmp/out 2>&1 &
	crowd=$!
	exec 5> /tmp/in
	for _ in $(seq 2400); do
		grep -q ready /tmp/out && return
		kill -0 $crowd 2> /dev/null || break
		sleep 0.1
	done
	cat /tmp/out
	return 1
}
disperse() { exec 5>&-; wait $crowd; }

own0=$(own) shared0=$(shared) descriptors0=$(descriptors)
start=$(date +%s%N)
crowd -contexts "$CONTEXTS" -qps "$QPS" -depth "$DEPTH"
took=$((($(date +%s%N) - start) / 1000000))
own1=$(own) shared1=$(shared)
echo "$CONTEXTS contexts of $QPS QPs of depth $DEPTH, made in $took ms: daemon's own memory $((own1 / 1024)) MiB (before $((own0 / 1024))), shared $(((shared1 - shared0) / 1024)) MiB, threads $(field "/proc/$UVERBSD_PID/status" Threads), descriptors $(descriptors)"
disperse
all_gone() { [ "$(contexts)" = 0 ] && [ $(($(shared) - shared0)) -lt 4096 ] && [ "$(descriptors)" -le $((descriptors0 + 4)) ]; }
eventually all_gone || { echo "left: $(contexts) contexts, $((($(shared) - shared0))) KiB shared, $(descriptors) descriptors (before $descriptors0)"; exit 1; }
echo "all ended: daemon's own memory $(($(own) / 1024)) MiB, shared $((($(shared) - shared0))) KiB more than before, descriptors $(descriptors) (before $descriptors0)"
[ $(((own1 + shared1 - shared0) / 1024)) -lt $MOST_MIB ]

crowd -contexts 100 -qps 1 -armed
before=$(ticks)
sleep 10
spent=$(($(ticks) - before)) # 10 ms each
disperse
echo "100 contexts with armed CQs: $((spent * 10)) ms of processor time in 10 s"
[ $((spent * 10)) -lt $((MOST_PERCENT * 100)) ]
