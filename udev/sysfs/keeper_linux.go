package sysfs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Keeper is a child process that outlives a daemon that is killed, and cleans
// up after it. Under systemd ExecStopPost does the same; the keeper is for
// all other ends (a daemon in the foreground, the OOM killer taking only it).
type Keeper struct {
	cmd  *exec.Cmd
	sock *os.File

	// mu guards untold, and the order of messages: what is dropped and could not be
	// said yet. The keeper would hold on to it for as long as the daemon runs.
	mu     sync.Mutex
	untold []uint64
}

// What the keeper is told, one message each: the first byte, and for hold and drop
// a number.
const (
	keeperQuit = 'q' // the daemon has cleaned up
	keeperHold = 'h' // with a descriptor
	keeperDrop = 'd'
	keeperMsg  = 1 + 8 // bytes
)

// StartKeeper runs this program again with args, which must lead it to
// KeeperMain. Call it before anything is mounted.
func StartKeeper(args ...string) (*Keeper, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("start the keeper: %w", err)
	}
	r, w := os.NewFile(uintptr(fds[0]), "keeper"), os.NewFile(uintptr(fds[1]), "keeper")
	defer r.Close()
	// Its own session: a Ctrl-C or a hangup of the terminal is not for it.
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Stdin, cmd.Stderr = r, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		_ = w.Close()
		return nil, fmt.Errorf("start the keeper: %w", err)
	}
	return &Keeper{cmd: cmd, sock: w}, nil
}

// Stop dismisses the keeper without cleaning: the daemon has done it itself.
func (k *Keeper) Stop() error {
	_, err := k.sock.Write([]byte{keeperQuit})
	_ = k.sock.Close()
	if werr := k.cmd.Wait(); err == nil {
		err = werr
	}
	if err != nil {
		return fmt.Errorf("stop the keeper: %w", err)
	}
	return nil
}

// Hold gives the keeper a copy of fd, which it hands to its heir function if the
// daemon is killed before Drop of the same id. Neither waits: of a keeper that does
// not keep up a Hold is lost, and a Drop is said with the next of either.
func (k *Keeper) Hold(id uint64, fd int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.catchUpLocked()
	_ = k.tell(keeperHold, id, unix.UnixRights(fd))
}

// Drop takes Hold back.
func (k *Keeper) Drop(id uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.untold = append(k.untold, id)
	k.catchUpLocked()
}

// catchUpLocked says what was dropped, as far as the keeper takes it.
func (k *Keeper) catchUpLocked() {
	n := 0
	for ; n < len(k.untold) && !errors.Is(k.tell(keeperDrop, k.untold[n], nil), unix.EAGAIN); n++ {
	}
	k.untold = append(k.untold[:0], k.untold[n:]...)
}

func (k *Keeper) tell(op byte, id uint64, rights []byte) error {
	var b [keeperMsg]byte
	b[0] = op
	binary.NativeEndian.PutUint64(b[1:], id)
	c, err := k.sock.SyscallConn()
	if err != nil {
		return err
	}
	if e := c.Control(func(s uintptr) {
		err = unix.Sendmsg(int(s), b[:], rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}); e != nil {
		return e
	}
	return err
}

// KeeperMain is the child's whole life: it waits for the daemon's end of its
// standard input to close, and then, unless it was dismissed, runs heir on each
// descriptor that it holds, and clean (sysfs.Clean and the modprobe guard's).
func KeeperMain(heir func(fd int), clean func() error) error {
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) == nil && l.Cur < l.Max {
		l.Cur = l.Max
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &l)
	}
	held := make(map[uint64]int)
	for {
		op, id, fd, err := keeperNext()
		switch {
		case err != nil:
			return fmt.Errorf("keeper: wait for the daemon: %w", err)
		case op == keeperQuit:
			return nil
		case op == 0: // killed
			for _, fd := range held {
				heir(fd)
			}
			return clean()
		case op == keeperHold && fd >= 0:
			held[id] = fd
		case op == keeperDrop:
			if fd, ok := held[id]; ok {
				_ = unix.Close(fd)
				delete(held, id)
			}
		}
	}
}

// keeperNext is the next message; op is 0 at the end, fd -1 if none came with it.
func keeperNext() (op byte, id uint64, fd int, err error) {
	var b [keeperMsg]byte
	oob := make([]byte, unix.CmsgSpace(4))
	n, oobn := 0, 0
	for {
		n, oobn, _, _, err = unix.Recvmsg(0, b[:], oob, unix.MSG_CMSG_CLOEXEC)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if errors.Is(err, unix.ECONNRESET) {
		return 0, 0, -1, nil
	}
	if err != nil || n == 0 {
		return 0, 0, -1, err
	}
	fd = -1
	if msgs, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil && len(msgs) > 0 {
		if fds, err := unix.ParseUnixRights(&msgs[0]); err == nil && len(fds) > 0 {
			fd = fds[0]
		}
	}
	return b[0], binary.NativeEndian.Uint64(b[1:]), fd, nil
}
