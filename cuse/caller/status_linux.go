package caller

import (
	"bytes"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// status is what we use of /proc/TID/status.
type status struct {
	name      string
	tgid      int
	tracerPid int
	seccomp   int // 0 none, 1 strict, 2 filter
}

// readStatus reads the status of a thread. The kernel escapes newlines in the name, so that a client cannot forge a line.
// ESRCH when the thread is gone.
func readStatus(tid int) (status, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/status")
	if err != nil {
		return status{}, goneError(err)
	}
	var s status
	for len(b) > 0 {
		var line []byte
		line, b, _ = bytes.Cut(b, []byte("\n"))
		key, val, _ := bytes.Cut(line, []byte(":\t"))
		switch string(key) {
		case "Name":
			s.name = printable(val)
		case "Tgid":
			s.tgid, err = strconv.Atoi(string(val))
		case "TracerPid":
			s.tracerPid, err = strconv.Atoi(string(val))
		case "Seccomp":
			s.seccomp, err = strconv.Atoi(string(val))
		}
		if err != nil {
			return status{}, err
		}
	}
	if s.tgid == 0 {
		return status{}, unix.ESRCH
	}
	return s, nil
}

// startTime is when a process began, in clock ticks since boot (field 22 of /proc/PID/stat): with its pid, a name that no
// other has.
func startTime(pid int) (string, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return "", goneError(err)
	}
	// The name, in parentheses, can hold anything: the fields begin after its end. The first is number 3.
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) < 20 {
		return "", unix.ESRCH
	}
	return string(fields[19]), nil
}

// printable makes a name chosen by the client safe for logs and terminals.
func printable(b []byte) string {
	out := bytes.Clone(b)
	for i, c := range out {
		if c < 0x20 || c >= 0x7f {
			out[i] = '?'
		}
	}
	return string(out)
}

// goneError turns "no such file" of a /proc entry into what it means.
func goneError(err error) error {
	if os.IsNotExist(err) {
		return unix.ESRCH
	}
	return err
}
