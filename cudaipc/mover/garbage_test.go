package mover_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// TestMoverImportsGarbage sends a mover arbitrary descriptions of a peer and expects each to be
// refused or opened, no leak, and the mover to live.
func TestMoverImportsGarbage(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	m := newFixture(t, nil)
	m.works()
	pid, fds := m.pid(), entries(t, "/proc/self/fd")
	odd := func() uint64 {
		return []uint64{0, 1, 4095, 4096, regionSize, 1 << 40, 1 << 46, 1 << 62, 1 << 63, ^uint64(0)}[random.IntN(10)]
	}
	opened := 0
	for range 300 {
		im := m.imports(1)
		for i := range im.Regions {
			r := &im.Regions[i]
			if random.IntN(4) == 0 {
				r.ID = cudaipc.RegionID(random.IntN(4))
			}
			switch random.IntN(6) {
			case 0:
				r.Size = odd()
			case 1:
				r.Addr = odd()
			case 2:
				r.Handle = make([]byte, random.IntN(300))
			case 3:
				_ = unix.Close(r.FD)
				r.FD, r.Kind = -1, cudaipc.Kind(random.IntN(6))
			}
		}
		if random.IntN(2) == 0 {
			im.Sync.StepOff, im.Sync.RevokeOff, im.Sync.Events = odd(), odd(), uint32(odd())
		}
		im.Pid = []int{0, -1, 1, im.Pid, 1 << 30}[random.IntN(5)]
		if m.imported(1, im) == nil {
			opened++
			if err := m.peer(1).Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Logf("%d of 300 were open", opened)
	m.works()
	if now := m.pid(); now != pid {
		t.Errorf("the mover is process %d, was %d", now, pid)
	}
	if n := entries(t, "/proc/self/fd"); n > fds+2 {
		t.Errorf("%d descriptors, %d before", n, fds)
	}
}
