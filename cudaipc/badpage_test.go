package cudaipc

import (
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestArenaLosesAPage: blocks that lie on a page of the arena that cannot be had are bad, the
// others are not, and this process lives; whether the peer's memory is mapped or reached in its
// process, with sums or without.
func TestArenaLosesAPage(t *testing.T) {
	const block, blocks = 16 << 10, 16
	for name, kind := range map[string]Kind{"mapped": KindFD, "in the process": KindPeer} {
		for _, sum := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				arena := memfd(t, block*blocks)
				defer func() { _ = unix.Close(arena) }()
				h, err := OpenHost(HostOptions{ArenaFD: arena, ArenaSize: block * blocks})
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = h.Close(AllPeers) }()
				mem := make([]byte, block*blocks)
				addr := uint64(uintptr(unsafe.Pointer(&mem[0])))
				region := Region{ID: 1, Kind: kind, Size: block * blocks, Addr: addr}
				if kind == KindFD {
					fd := memfd(t, block*blocks)
					defer func() { _ = unix.Close(fd) }()
					region.FD = dupFD(t, fd)
				}
				if err := h.Import(Import{Pid: os.Getpid(), Regions: []Region{region}}); err != nil {
					t.Fatal(err)
				}
				for _, dir := range []Direction{Gather, Scatter} {
					c := &Copy{Dir: dir, Sum: sum}
					for b := range blocks {
						at := int64(b) * block
						c.Runs = append(c.Runs, Run{Region: 1, RegionOff: uint64(at), ArenaOff: at, Len: block})
						c.Blocks = append(c.Blocks, Block{Runs: 1})
					}
					if d := copyAll(t, h, c); d.Err != nil {
						t.Fatalf("before: %v", d.Err)
					}
					if err := unix.Ftruncate(arena, block*blocks-4096); err != nil {
						t.Fatal(err)
					}
					d := copyAll(t, h, c)
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
