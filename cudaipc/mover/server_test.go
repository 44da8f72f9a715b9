package mover

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// lostDevice is a device that is lost already.
type lostDevice struct{ why error }

func (d lostDevice) Lost() <-chan struct{} {
	lost := make(chan struct{})
	close(lost)
	return lost
}

func (d lostDevice) LostBy() error { return d.why }

// TestWatchedLossSaysWhy expects the agent to learn the cause of the loss before any call has
// answered.
func TestWatchedLossSaysWhy(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	mine, err := newConn(pair[0])
	theirs, other := newConn(pair[1])
	if err := errors.Join(err, other); err != nil {
		t.Fatal(err)
	}
	defer mine.close()
	defer theirs.close()
	s := &server{conn: theirs, ending: make(chan struct{})}
	s.watch(lostDevice{fmt.Errorf("%w: a call of the driver", cudaipc.ErrLost)})
	msg, _, err := mine.receive(nil)
	if err != nil {
		t.Fatal(err)
	}
	f := &fields{rest: msg}
	kind := f.u8()
	f.u64()
	if why := string(f.bytes()); kind != msgLost || !strings.Contains(why, "a call of the driver") {
		t.Errorf("message %d says %q", kind, why)
	}
}
