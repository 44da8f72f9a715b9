//go:build cuda

package cuda_test

import (
	"bytes"
	"slices"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// TestCUDAArenaLosesAPage takes a page from an arena that is not pinned, whose bytes this process
// copies and sums. It expects copies that touch it to have only bad blocks, the others to go on,
// and this process to live.
func TestCUDAArenaLosesAPage(t *testing.T) {
	const block, blocks, bad = 64 << 10, 16, 5
	unpinned := func(o *cuda.Options) { o.NoPin, o.Ring = true, 1<<20 }
	b := newBench(t, devicetest.Spec{Regions: []int64{blocks * block}}, unpinned)
	b.do(devicetest.Op{Kind: devicetest.Fill, Region: 1, Len: blocks * block, Seed: 8})
	copyOf := func(dir cudaipc.Direction, sum bool, from, to int) *cudaipc.Copy {
		c := &cudaipc.Copy{Dir: dir, Sum: sum}
		for i := from; i < to; i++ {
			at := int64(i * block)
			c.Runs = append(c.Runs, cudaipc.Run{Region: 1, RegionOff: uint64(at), ArenaOff: at, Len: block})
			c.Blocks = append(c.Blocks, cudaipc.Block{Runs: 1})
		}
		return c
	}
	if d := b.end(copyOf(cudaipc.Gather, true, 0, blocks)); d.Err != nil {
		t.Fatal(d.Err)
	}
	takeAway(t, b.arena[bad*block+8192:])
	for _, dir := range []cudaipc.Direction{cudaipc.Scatter, cudaipc.Gather} {
		for _, sum := range []bool{true, false} {
			if d := b.end(copyOf(dir, sum, 0, blocks)); d.Bad == nil || slices.Contains(d.Bad, false) {
				t.Fatalf("direction %d, sums %v: bad blocks %v (%v), want all", dir, sum, d.Bad, d.Err)
			}
			if d := b.end(copyOf(dir, sum, bad+1, blocks)); d.Err != nil {
				t.Fatalf("direction %d, sums %v: beside the page: %v", dir, sum, d.Err)
			}
		}
	}
	want := pattern(8, blocks*block)
	if got := b.do(devicetest.Op{Kind: devicetest.Read, Region: 1, Off: (bad + 1) * block,
		Len: (blocks - bad - 1) * block}); !bytes.Equal(got, want[(bad+1)*block:]) {
		t.Error("the blocks after the page have other bytes")
	}
}

// end does a copy.
func (b *bench) end(c *cudaipc.Copy) cudaipc.Done {
	b.t.Helper()
	ticket, err := b.peer.Copy(c)
	if err != nil {
		b.t.Fatal(err)
	}
	d, ok, err := ticket(30 * time.Second)
	if err != nil || !ok {
		b.t.Fatalf("%v, %v", ok, err)
	}
	return d
}

// takeAway takes the page that mem begins with away from under it: an access is a SIGBUS.
func takeAway(t *testing.T, mem []byte) {
	t.Helper()
	fd, err := unix.MemfdCreate("nothing", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	const prot, how = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED | unix.MAP_FIXED
	if _, err := unix.MmapPtr(fd, 0, unsafe.Pointer(&mem[0]), 4096, prot, how); err != nil {
		t.Fatal(err)
	}
}
