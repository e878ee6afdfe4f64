#!/bin/bash
# Has tshark and scapy judge a capture of ours (uverbsd capture -w FILE): every packet
# must be one of RoCE v2 to tshark, none malformed, and every ICRC right (judge.py).
# Prints counts; exit status 1 if anything is wrong. Needs tshark and python3-scapy.
#
# usage: judge.sh FILE.pcapng
set -eu -o pipefail
file=${1:?usage: judge.sh FILE.pcapng}
here=$(dirname "$0")

# What is in a message is the client's matter: dissectors that guess at it see
# malformed packets in any bytes.
guess=()
while read -r name; do guess+=(--disable-protocol "$name"); done < <(
	tshark -G heuristic-decodes 2> /dev/null | awk -F'\t' '$1 == "infiniband.payload" { print $2 }')

tshark -r "$file" "${guess[@]}" -T fields -E separator=, -e frame.number -e frame.len -e frame.cap_len \
	-e infiniband.bth.opcode -e infiniband.invariant.crc -e _ws.malformed | awk -F, '
	$3 < $2 { cut++ }
	$4 == "" && $3 == $2 { print "packet " $1 ": not dissected as RoCE"; bad++ }
	$5 == "" && $3 == $2 && $4 < 160 { # of XRC tshark looks at BTH alone
		print "packet " $1 ": no ICRC found"; bad++
	}
	$6 != "" { print "packet " $1 ": malformed (opcode " $4 ")"; bad++ }
	{ n++ }
	END { printf "tshark: %d packets, %d cut off, %d wrong\n", n, cut, bad; exit bad > 0 || n == 0 }'
/usr/bin/python3 "$here/judge.py" "$file"
