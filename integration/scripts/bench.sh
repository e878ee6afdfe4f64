#!/bin/bash
# Unmodified programs over the daemon's mapped queues, over its write() path, and
# then, in the same boot, over the kernel's rdma_rxe on a dummy interface: medians
# of three as a table of ratios, and one line of JSON after "JSON ". ROUNDS and
# ONLY (a row's name) are for trying things out.
set -eu -o pipefail
. /opt/lib.sh
[ ! -e /opt/bench.env ] || . /opt/bench.env
ROUNDS=${ROUNDS:-3} ONLY=${ONLY:-}
port=23000

# rows: NAME, unit, which is better, what is asked of ours over rdma_rxe's, command.
rows() {
	cat <<'END'
write_bw_64k MiB/s more 5 ib_write_bw -s 65536 -n 1000
read_bw_64k MiB/s more 5 ib_read_bw -s 65536 -n 1000
send_bw_64k MiB/s more 4 ib_send_bw -s 65536 -n 1000
rc_pingpong_4k us less 0.8 ibv_rc_pingpong -s 4096 -n 1000
rc_pingpong_4k_events us less 1.2 ibv_rc_pingpong -s 4096 -n 500 -e
send_lat_64 us less 1.5 ib_send_lat -s 64 -n 2000
send_rate_64 msg/s more 0.5 ib_send_bw -s 64 -n 20000
send_rate_64_list msg/s more 1 ib_send_bw -s 64 -n 20000 -l 16
END
}

# value PROGRAM NAME: the figure out of a pair's output on stdin.
value() {
	case $1 in
	ibv_*) awk '/usec\/iter/ { for (i = 2; i <= NF; i++) if ($i == "usec/iter") print $(i - 1) }' | tail -1 ;;
	*_lat) awk '$1 == "client:" && $2 ~ /^[0-9]+$/ { print $6 }' ;; # t_typical
	*) awk -v name="$2" '$1 == "client:" && $2 ~ /^[0-9]+$/ { print name ~ /rate/ ? $6 * 1e6 : $5 }' ;;
	esac
}

# once DEVICE GID-INDEX NAME PROGRAM ARGS...: one figure.
once() {
	local dev=$1 gid=$2 name=$3 program=$4 out i v
	shift 4
	local args=(-d "$dev" "$@")
	case $program in
	ibv_*) [ "$gid" = - ] || args+=(-g "$gid") ;;
	*) args+=(-F); [ "$gid" = - ] || args+=(-x "$gid") ;;
	esac
	for i in $(seq 12); do # perftest: see lib.sh
		port=$((port + 1))
		if out=$(pair $port "$program" "${args[@]}"); then
			v=$(value "$program" "$name" <<< "$out")
			[ -n "$v" ] && { echo "$v"; return; }
		fi
		grep -Eq "^(client|server): Correlation coefficient .* < " <<< "$out" || break
	done
	echo "$out" >&2
	return 1
}

# measure SIDE DEVICE GID-INDEX: all rows, ROUNDS times.
measure() {
	local side=$1 dev=$2 gid=$3 name unit better want command v
	for _ in $(seq "$ROUNDS"); do
		while read -r name unit better want command; do
			[ -z "$ONLY" ] || [ "$name" = "$ONLY" ] || continue
			# shellcheck disable=SC2086
			v=$(once "$dev" "$gid" "$name" $command < /dev/null) || { echo "$side: $name does not work" >&2; continue; }
			echo "$side $name $v" >> /tmp/figures
			port=$((port + 20))
		done < <(rows)
	done
}

: > /tmp/figures
cat > /tmp/bench.toml <<'END'
[[device]]
name = "rxe0"
provider = "rxe"
[[device]]
name = "qib0"
provider = "qib"
END
/opt/uverbsd serve --config /tmp/bench.toml > /tmp/bench.log 2>&1 &
export UVERBSD=/opt/uverbsd UVERBSD_PID=$!
eventually "$UVERBSD" status > /dev/null 2>&1
uname -r
measure mapped rxe0 1
measure write qib0 -
/opt/roundtrip | sed 's/^/round trip of the write() path: /'
to_kernel
measure rxe rxe0 1
rows | awk '
	function median(k, s,  n, a, i, j, t) {
		n = split(k, a, " ")
		for (i = 2; i <= n; i++) for (j = i; j > 1 && a[j - 1] + 0 > a[j] + 0; j--) { t = a[j]; a[j] = a[j - 1]; a[j - 1] = t }
		return n ? a[int((n + 1) / 2)] : 0
	}
	BEGIN { while ((getline line < "/tmp/figures") > 0) { split(line, f, " "); all[f[1], f[2]] = all[f[1], f[2]] " " f[3] }
		printf "%-22s %6s %12s %12s %12s %8s %8s %6s\n", "row", "unit", "mapped", "write()", "rdma_rxe", "ratio", "asked", "" ; json = "" }
	{
		m = median(all["mapped", $1]); w = median(all["write", $1]); k = median(all["rxe", $1])
		if (!m && !w && !k) next
		r = k ? m / k : 0
		ok = !k || !m ? "?" : ($3 == "more" ? r >= $4 : r <= $4) ? "ok" : "FALLS SHORT"
		printf "%-22s %6s %12.1f %12.1f %12.1f %8.2f %s%7s %s\n", $1, $2, m, w, k, r, $3 == "more" ? ">=" : "<=", $4, ok
		json = json (json ? ", " : "") sprintf("{\"row\": \"%s\", \"unit\": \"%s\", \"better\": \"%s\", \"mapped\": %s, \"write\": %s, \"rdma_rxe\": %s, \"ratio\": %.3f, \"asked\": %s}", $1, $2, $3, m, w, k, r, $4)
	}
	END { print "JSON [" json "]" }'
