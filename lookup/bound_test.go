package lookup

import (
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// countingIndex counts how many hashes it is asked for.
type countingIndex struct {
	*setIndex
	asked int
}

func (x *countingIndex) Prefix(s pool.SpaceID, g uint8, h pool.Hashes) int {
	x.asked += h.N
	return x.setIndex.Prefix(s, g, h)
}

func (x *countingIndex) Exists(s pool.SpaceID, g uint8, h pool.Hashes, present []bool) {
	x.asked += h.N
	x.setIndex.Exists(s, g, h, present)
}

func (x *countingIndex) Pin(s pool.SpaceID, g uint8, h pool.Hashes, maxBytes int64, refs []pool.Ref) (int, []pool.Ref,
	int64) {
	x.asked += h.N
	return x.setIndex.Pin(s, g, h, maxBytes, refs)
}

const boundBlocks = 2048

// boundQuery asks for a long chain of hashes that differ.
func boundQuery() *Query {
	blob := make([]byte, 0, 4*boundBlocks)
	for i := range boundBlocks {
		blob = append(blob, byte(i), byte(i>>8), 1, 2)
	}
	return &Query{Hashes: pool.Chain(blob, 4), Tokens: 16 * boundBlocks, AllowFull: true}
}

// A look-up must not take time that grows with the square of the prompt, whatever is stored: it
// holds up all who ask on the same socket. Here two sliding windows never agree.
func TestWindowsThatNeverAgree(t *testing.T) {
	ix := &countingIndex{setIndex: newSetIndex()}
	q := boundQuery()
	for i := range boundBlocks {
		ix.store(uint8(i%2), q.Hashes.At(i))
	}
	s := &Space{HashTokens: 16, Groups: []Group{{16, 16}, {16, 16}}}
	if got := Longest(ix, s, q); got != 0 {
		t.Errorf("%d tokens, want 0", got)
	}
	if ix.asked > 8*boundBlocks {
		t.Errorf("%d hashes were asked of the index for a prompt of %d", ix.asked, boundBlocks)
	}
}

// A window that does not fit under the cap at one end does not fit at the next ones either.
func TestWindowOverTheCap(t *testing.T) {
	ix := &countingIndex{setIndex: newSetIndex()}
	q := boundQuery()
	for i := range boundBlocks {
		ix.store(0, q.Hashes.At(i))
		ix.store(1, q.Hashes.At(i))
	}
	s := &Space{HashTokens: 16, Groups: []Group{{16, 0}, {16, 64 * 16}}}
	for _, room := range []int64{0, 10 * entryBytes, 63 * entryBytes, 70 * entryBytes} {
		ix.asked = 0
		h := Reserve(ix, s, q, room, nil)
		if h.Bytes > room || !h.Capped {
			t.Errorf("room for %d bytes: %d are pinned, capped %v", room, h.Bytes, h.Capped)
		}
		if room == 70*entryBytes && h.Tokens == 0 {
			t.Errorf("room for %d bytes: nothing is pinned, want the beginning of the chain", room)
		}
		ix.Unpin(h.Refs)
		if ix.asked > 64*boundBlocks {
			t.Errorf("room for %d bytes: %d hashes were asked of the index for a prompt of %d", room, ix.asked,
				boundBlocks)
		}
	}
	if len(ix.pins) != 0 {
		t.Errorf("%d blocks are still pinned", len(ix.pins))
	}
}
