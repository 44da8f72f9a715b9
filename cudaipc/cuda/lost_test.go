//go:build cuda

package cuda

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
)

// TestCUDALostDevice expects that after an error that no later call survives every call reports it,
// and that Close still ends everything.
func TestCUDALostDevice(t *testing.T) {
	d, err := Open(Options{Arena: memory(t)})
	if err != nil {
		t.Fatal(err)
	}
	p, err := d.Import(cudaipc.Import{})
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
		"the call": why, "Import": second(d.Import(cudaipc.Import{})),
		"Poll": second(p.Poll(cudaipc.Wait{})), "Copy": second(p.Copy(&cudaipc.Copy{})),
		"Close of the peer": p.Close(), "Close": d.Close(),
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
	d, err := Open(Options{Arena: memory(t)})
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
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// memory returns an arena of 4 MiB.
func memory(t *testing.T) []byte {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, 4<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	return mem
}

func second[T any](_ T, err error) error { return err }
