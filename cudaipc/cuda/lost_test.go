//go:build cuda

package cuda

import (
	"errors"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
)

const arenaSize = 4 << 20

// TestCUDALostDevice expects that after an error that no later call survives every call reports it,
// and that Close still ends everything.
func TestCUDALostDevice(t *testing.T) {
	fd := memfd(t, arenaSize)
	defer func() { _ = unix.Close(fd) }()
	d, err := Open(Options{ArenaFD: fd, ArenaSize: arenaSize})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.judge(&driver.Error{
		Call: "cuEventQuery",
		Code: driver.InvalidHandle,
	}); errors.Is(err, cudaipc.ErrLost) {
		t.Fatal("lost by an error that is of one call")
	}
	why := d.judge(&driver.Error{Call: "cuEventQuery", Code: 700})
	for name, err := range map[string]error{
		"the call": why, "Import": d.Import(cudaipc.Import{Peer: 1}), "Close": d.Close(1),
		"Poll": second(d.Poll(cudaipc.Wait{})), "Copy": second(d.Copy(&cudaipc.Copy{})),
		"Done":         third(d.Done(1, time.Second)),
		"Close of all": d.Close(cudaipc.AllPeers),
	} {
		if !errors.Is(err, cudaipc.ErrLost) || !strings.Contains(err.Error(), "cuEventQuery") {
			t.Errorf("%s: %v, want ErrLost and the call", name, err)
		}
	}
	if d.Info().Lost == "" {
		t.Error("Info does not say that the device is lost")
	}
}

// TestCUDALoadsGoFirst expects each direction to have a stream of its own, and the GPU to do the
// loads first.
func TestCUDALoadsGoFirst(t *testing.T) {
	fd := memfd(t, arenaSize)
	defer func() { _ = unix.Close(fd) }()
	d, err := Open(Options{ArenaFD: fd, ArenaSize: arenaSize})
	if err != nil {
		t.Fatal(err)
	}
	saves, loads := d.lanes[cudaipc.Gather], d.lanes[cudaipc.Scatter]
	if saves.stream == loads.stream {
		t.Error("saves and loads have one stream")
	}
	if loads.priority >= saves.priority {
		t.Errorf("priority of loads %d, of saves %d; lower numbers go first", loads.priority, saves.priority)
	}
	if err := d.Close(cudaipc.AllPeers); err != nil {
		t.Error(err)
	}
}

func memfd(t *testing.T, size int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate("cuda-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	return fd
}

func second[T any](_ T, err error) error { return err }

func third(_ cudaipc.Done, _ bool, err error) error { return err }
