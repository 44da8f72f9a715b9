package tier

import (
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// worn is a memory with one place reused so often that its refs look like promises.
type worn struct {
	*dram.Pool
	at int // in a chain
}

func (w worn) Pin(
	s pool.SpaceID, group uint8, h pool.Hashes, maxBytes int64, refs []pool.Ref,
) (int, []pool.Ref, int64) {
	base := len(refs)
	n, refs, bytes := w.Pool.Pin(s, group, h, maxBytes, refs)
	if w.at < n {
		refs[base+w.at] |= promiseBit
	}
	return n, refs, bytes
}

func (w worn) Unpin(refs []pool.Ref) {
	plain := make([]pool.Ref, len(refs))
	for i, r := range refs {
		plain[i] = r &^ promiseBit
	}
	w.Pool.Unpin(plain)
}

// TestWornMemory checks that a pin that cannot be told from a promise shortens the answer, and
// nothing stays pinned.
func TestWornMemory(t *testing.T) {
	m := openMemory(t, 100)
	n := openNode(t, m, worn{m, 3}, 1, Options{PrefetchBytes: 64 << 10},
		[]Tier{{Name: "disk", Store: pooltest.NewShelf(), Local: true}})
	h := chain("a", 10)
	n.save(h)
	count, refs, bytes := n.Pin(n.space, 0, h, 1<<40, nil)
	if count != 3 || len(refs) != 3 || bytes != 3<<10 {
		t.Errorf("%d pinned, %d refs, %d bytes; want 3", count, len(refs), bytes)
	}
	n.Unpin(refs)
}
