//go:build cuda

package cuda

import (
	"testing"

	"github.com/kvagent/kvagent/crc32c"
	"github.com/kvagent/kvagent/cudaipc"
)

// TestCUDASumsBeginBeforeTheEnd expects each whole block to be given to the summers once, as soon
// as it has arrived, and the flight to end with the last.
func TestCUDASumsBeginBeforeTheEnd(t *testing.T) {
	arena := make([]byte, 6<<20)
	for i := range arena {
		arena[i] = byte(i * 7)
	}
	c := &cudaipc.Copy{Sum: true, Blocks: []cudaipc.Block{{Runs: 2}, {Runs: 0, Seed: 5}, {Runs: 1, Seed: 9}, {Runs: 1}}}
	for _, n := range []uint32{1 << 20, 1 << 20, 3 << 20, 1 << 20} {
		off := int64(0)
		if last := len(c.Runs) - 1; last >= 0 {
			off = c.Runs[last].ArenaOff + int64(c.Runs[last].Len)
		}
		c.Runs = append(c.Runs, cudaipc.Run{ArenaOff: off, Len: n})
	}
	f := &flight{
		Flight:  &cudaipc.Flight{Copy: c, End: cudaipc.Done{Sums: make([]uint32, len(c.Blocks))}},
		inOrder: true,
	}
	f.waits.Store(1)
	s := &summers{arena: arena, parts: newQueue[sumPart]()}
	d := &Device{sums: s}
	blocks := 0
	for _, step := range []struct {
		bytes uint64
		want  int // blocks that can be summed then
	}{{1 << 20, 0}, {1<<20 - 1, 0}, {1, 2}, {3<<20 - 1, 2}, {1, 3}, {1 << 20, 4}} {
		d.arrived(f, step.bytes)
		for {
			part, ok := s.parts.take(false)
			if !ok {
				break
			}
			if part.from != blocks {
				t.Fatalf("blocks from %d on, %d were given", part.from, blocks)
			}
			blocks = part.to
			s.sum(part)
			f.waits.Add(-1)
		}
		if blocks != step.want {
			t.Fatalf("%d bytes have landed: %d blocks are given, want %d", f.arrived, blocks, step.want)
		}
	}
	if n := f.waits.Load(); n != 1 {
		t.Errorf("%d waits, want the one for the copies", n)
	}
	for i, want := range []uint32{
		crc32c.Update(0, arena[:2<<20]), 5, crc32c.Update(9, arena[2<<20:5<<20]),
		crc32c.Update(0, arena[5<<20:]),
	} {
		if f.End.Sums[i] != want {
			t.Errorf("block %d: sum %08x, want %08x", i, f.End.Sums[i], want)
		}
	}
}
