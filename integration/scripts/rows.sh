#!/bin/bash
# The failure classes' rows against the daemon. ROWS: which; default all.
set -u
status=0
for row in ${ROWS:-row1 row4 row5 row6 row8 row9 row13 row23 row24 row25 row26 row29 row30 row31 row32 row34 row35 row36}; do
	timeout 120 /opt/raw row "$row" > /tmp/out 2>&1
	rc=$?
	[ $rc = 0 ] || status=1
	grep -E '^not ok|^# |SKIP' /tmp/out | head -40
	grep -c '^ok' /tmp/out | sed "s/^/$row exit $rc, ok: /"
	grep -vE '^not ok|^# |^ok' /tmp/out | head -20
done
exit $status
