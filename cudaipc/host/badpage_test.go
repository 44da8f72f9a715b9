package host

import (
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// TestArenaLosesAPage expects only the blocks on a lost page of the arena to be bad, and this
// process to live, whether the peer's memory is mapped or reached in its process, with sums or
// without.
func TestArenaLosesAPage(t *testing.T) {
	const block, blocks = 16 << 10, 16
	for name, kind := range map[string]cudaipc.Kind{"mapped": cudaipc.KindFD, "in the process": cudaipc.KindPeer} {
		for _, sum := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				arena := memfd(t, block*blocks)
				defer func() { _ = unix.Close(arena) }()
				mapped, err := cudaipc.MapFD(arena, block*blocks)
				if err != nil {
					t.Fatal(err)
				}
				h := Open(mapped)
				mem := make([]byte, block*blocks)
				addr := uint64(uintptr(unsafe.Pointer(&mem[0])))
				region := cudaipc.Region{ID: 1, Kind: kind, Size: block * blocks, Addr: addr}
				if kind == cudaipc.KindFD {
					fd := memfd(t, block*blocks)
					defer func() { _ = unix.Close(fd) }()
					region.FD = dupFD(t, fd)
				}
				p := open(t, h, cudaipc.Import{Pid: os.Getpid(), Regions: []cudaipc.Region{region}})
				for _, dir := range []cudaipc.Direction{cudaipc.Gather, cudaipc.Scatter} {
					c := &cudaipc.Copy{Dir: dir, Sum: sum}
					for b := range blocks {
						at := int64(b) * block
						c.Runs = append(c.Runs, cudaipc.Run{Region: 1, RegionOff: uint64(at), ArenaOff: at, Len: block})
						c.Blocks = append(c.Blocks, cudaipc.Block{Runs: 1})
					}
					if d := copyAll(t, p, c); d.Err != nil {
						t.Fatalf("before: %v", d.Err)
					}
					if err := unix.Ftruncate(arena, block*blocks-4096); err != nil {
						t.Fatal(err)
					}
					d := copyAll(t, p, c)
					for b := range blocks {
						if d.Bad == nil || d.Bad[b] != (b == blocks-1) {
							t.Fatalf("direction %d: bad blocks %v (%v), want the last", dir, d.Bad, d.Err)
						}
					}
					if err := unix.Ftruncate(arena, block*blocks); err != nil {
						t.Fatal(err)
					}
				}
			})
		}
	}
}
