package proof

import (
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// TestChildThatDoesNotAnswer expects a child without an answer to be reported as such.
func TestChildThatDoesNotAnswer(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(pair[:])
	if err := unix.SetsockoptTimeval(pair[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO,
		&unix.Timeval{Usec: 1000}); err != nil {
		t.Fatal(err)
	}
	c := &child{control: pair[0]}
	if _, err := c.do(&order{Op: opLoop}); err == nil ||
		!strings.Contains(err.Error(), "loop: the process did not answer") {
		t.Errorf("%v, want that the process did not answer", err)
	}
}

// TestOrdersTravel sends an order with every field set, and finds all of it at the other end.
func TestOrdersTravel(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(pair[:])
	sent := order{
		Op: opAgent, Sizes: []int64{1}, Virtual: true, Piece: 2, Region: 3, Len: 4, Seed: 5, Word: 6, Delay: 7, Step: 8,
		Rounds: 9,
		Import: &cudaipc.Import{
			Peer: 1, Pid: 2, GPU: cudaipc.UUID{3}, Proof: 4, Sync: &cudaipc.Sync{Region: 5},
			Regions: []cudaipc.Region{{ID: 6, Size: 7, Handle: []byte{8}}},
		},
	}
	if err := send(pair[0], &sent); err != nil {
		t.Fatal(err)
	}
	var got order
	if _, err := receive(pair[1], &got); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, sent) {
		t.Errorf("sent %+v, received %+v", sent, got)
	}
}
