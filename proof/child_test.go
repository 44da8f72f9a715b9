package proof

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestChildThatDoesNotAnswer is said to be one.
func TestChildThatDoesNotAnswer(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(pair[:])
	if err := unix.SetsockoptTimeval(pair[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 1000}); err != nil {
		t.Fatal(err)
	}
	c := &child{control: pair[0]}
	if _, err := c.do(&order{Op: opLoop}); err == nil || !strings.Contains(err.Error(), "loop: the process did not answer") {
		t.Errorf("%v, want that the process did not answer", err)
	}
}
