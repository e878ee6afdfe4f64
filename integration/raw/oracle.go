package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// allowed is a case in which the kernel's rdma_rxe may answer otherwise than
// the daemon must, and why.
type allowed struct {
	cases  string       // a glob
	kernel []unix.Errno // what it may answer
	why    string
}

const (
	whyNoWrite = "rxe's clients poll and post through mapped queues: it masks the command (uverbs_cmd_mask)"
	whyNoXRC   = "rxe has no XRC domains"
	whyUdata   = "rxe refuses a provider part that it does not know, or that has no room for its own"
	whyNotOld  = "rxe has it since 6.3"
	whyExtHole = "the kernel reads a hole's extended header as a legacy one; libibverbs falls back on EOPNOTSUPP only"
)

const (
	ok      = unix.Errno(0)
	inval   = unix.EINVAL
	notSupp = unix.EOPNOTSUPP
)

// allowances: the first that matches a case counts.
var allowances = []allowed{
	{"POLL_CQ/*", []unix.Errno{notSupp}, whyNoWrite},
	{"POST_RECV/*", []unix.Errno{notSupp}, whyNoWrite},
	{"POST_SRQ_RECV/*", []unix.Errno{notSupp}, whyNoWrite},
	{"CREATE_QP_XRC_TGT/*", []unix.Errno{inval}, whyNoXRC},
	{"CREATE_QP_XRC_INI/*", []unix.Errno{inval, notSupp}, whyNoXRC},
	{"OPEN_XRCD/*", []unix.Errno{notSupp}, whyNoXRC},
	{"CLOSE_XRCD/*", []unix.Errno{notSupp}, whyNoXRC},
	{"OPEN_QP/*", []unix.Errno{notSupp}, whyNoXRC},
	{"CREATE_XSRQ/*", []unix.Errno{inval, notSupp}, whyNoXRC},
	{"CREATE_QP*/long-zero", []unix.Errno{inval}, whyUdata},
	{"EX_CREATE_*/no-response", []unix.Errno{inval}, whyUdata},
	{"REREG_MR/trans-*", []unix.Errno{notSupp}, "rxe cannot move a region"},
	{"REREG_MR/*", []unix.Errno{notSupp}, whyNotOld},
	{"REG_MR/access-hugetlb", []unix.Errno{ok}, "rxe before 6.3 takes any flag"},
	{"REG_MR/*on-demand", []unix.Errno{notSupp, inval}, "rxe has no on-demand paging in these kernels"},
	{"*MODIFY_QP/pkey-index-high", []unix.Errno{ok}, "rxe has one P_Key and does not look at the index"},
	{"EX_MODIFY_CQ/*", []unix.Errno{notSupp}, "rxe has no moderation"},
	{"EX-NUMBER-*/*", []unix.Errno{inval}, whyExtHole},
}

// noForeignXRCD are the cases that rdma_rxe cannot be asked: it makes no domain
// for another file to have.
var noForeignXRCD = map[string]bool{
	"CREATE_QP_XRC_TGT/xrcd-foreign": true, "CLOSE_XRCD/handle-foreign": true, "CREATE_XSRQ/xrcd-foreign": true, "OPEN_QP/xrcd-foreign": true,
}

// excused says whether the kernel may answer a case so.
func excused(name string, got unix.Errno) bool {
	for _, a := range allowances {
		if ok, _ := path.Match(a.cases, name); ok {
			return slices.Contains(a.kernel, got)
		}
	}
	return false
}

func compareCommand(args []string) error {
	if len(args) != 2 {
		return errors.New("want two files: the daemon's lines and the kernel's")
	}
	ours, err := readWalk(args[0])
	if err != nil {
		return err
	}
	theirs, err := readWalk(args[1])
	if err != nil {
		return err
	}
	n, allowed := 0, 0
	for _, c := range ours.order {
		k, ok := theirs.errno[c]
		o := ours.errno[c]
		switch {
		case ok && k == o:
		case ok && excused(c, k):
			allowed++
		case !ok && noForeignXRCD[c]:
			allowed++
		case !ok:
			n++
			fmt.Printf("difference: %s: daemon %s, kernel has no such line\n", c, errnoName(o))
		default:
			n++
			fmt.Printf("difference: %s: daemon %s, kernel %s\n", c, errnoName(o), errnoName(k))
		}
	}
	fmt.Printf("compared %d cases: %d differences, %d more with a reason\n", len(ours.order), n, allowed)
	if n > 0 {
		return errMismatch
	}
	return nil
}

type walkLines struct {
	order []string
	errno map[string]unix.Errno
}

func readWalk(file string) (*walkLines, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	w := &walkLines{errno: map[string]unix.Errno{}}
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		var name string
		var e int
		if n, _ := fmt.Sscanf(strings.TrimSpace(sc.Text()), "%s %d", &name, &e); n == 2 {
			w.order, w.errno[name] = append(w.order, name), unix.Errno(e)
		}
	}
	return w, sc.Err()
}
