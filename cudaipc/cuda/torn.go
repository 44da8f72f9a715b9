//go:build cuda

package cuda

import (
	"sync"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pagefault"
)

// torn is what could not be read from the arena or written to it: the ends of a copy's blocks that
// lie there. Its lane and the summers note it.
type torn struct {
	sync.Mutex
	places []place
	err    error // of the first
}

// tear notes that n bytes at an offset of the arena did not arrive, or could not be summed.
func (f *flight) tear(off, n uint64, err error) {
	f.torn.Lock()
	defer f.torn.Unlock()
	f.torn.places = append(f.torn.places, place{off, n})
	if f.torn.err == nil {
		f.torn.err = err
	}
}

// tornUnit is what carry copies in one piece where a page cannot be had: the smallest page.
const tornUnit = 4 << 10

// carry copies src to dst, one of which lies in the arena at off. Pages that cannot be had are
// torn; the GPU gets whatever was there before, and nobody takes it for the block's bytes.
func (f *flight) carry(arena, dst, src []byte, off uint64) {
	n := min(len(dst), len(src))
	if pagefault.Guard(arena, nil, func() { copy(dst, src) }) == nil {
		return
	}
	for at := 0; at < n; {
		to := min(n, at+tornUnit-int((off+uint64(at))%tornUnit))
		if err := pagefault.Guard(arena, nil, func() { copy(dst[at:to], src[at:to]) }); err != nil {
			f.tear(off+uint64(at), uint64(to-at), err)
		}
		at = to
	}
}

// markTorn makes the blocks bad that have bytes in torn places. Nothing of the flight is under way
// any more.
func (f *flight) markTorn() {
	if f.torn.err == nil {
		return
	}
	run := 0
	for i := range f.copy.Blocks {
		bad := false
		for range f.copy.Blocks[i].Runs {
			bad = bad || f.torn.holds(&f.copy.Runs[run])
			run++
		}
		if bad {
			f.End.MarkBad(i, len(f.copy.Blocks), f.torn.err)
		}
	}
}

func (t *torn) holds(r *cudaipc.Run) bool {
	for _, p := range t.places {
		if from := uint64(r.ArenaOff); p.off < from+uint64(r.Len) && from < p.off+p.n {
			return true
		}
	}
	return false
}
