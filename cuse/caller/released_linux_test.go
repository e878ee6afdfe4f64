package caller

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// An access after the last Put must not use a descriptor number that may be
// another client's by now.
func TestAccessAfterRelease(t *testing.T) {
	p, err := OpenProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	p.Put()
	var b [8]byte
	for name, f := range map[string]func() error{
		"ReadAt":     func() error { return p.ReadAt(b[:], 0x1000) },
		"WriteAt":    func() error { return p.WriteAt(b[:], 0x1000) },
		"CheckRange": func() error { return p.CheckRange(0x1000, 1, false) },
	} {
		if err := f(); !errors.Is(err, unix.ESRCH) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
