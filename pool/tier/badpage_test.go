package tier

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
)

const (
	tornBlocks = 64 // that the memory of a torn node has room for
	tornPage   = 4  // of them lie in one page
	tornSlab   = 16 // of them lie in one slab, which is not used again after a bad page
)

// newTorn returns a node whose memory can lose the end of its arena.
func newTorn(t *testing.T, tr Tier) (n *node, d *dram.Pool) {
	t.Helper()
	d, err := dram.Open(dram.Options{Bytes: tornBlocks << 10, SlabBytes: tornSlab << 10, HugePages: dram.Off})
	check(t, err)
	check(t, d.Populated())
	log := func(tier, what string, err error) { t.Logf("tier %q: %s: %v", tier, what, err) }
	p, err := Open(d, []Tier{tr}, Options{PrefetchBytes: 64 << 10, Log: log})
	check(t, err)
	t.Cleanup(func() {
		check(t, p.Close())
		n.mu.Lock()
		if len(n.mu.open)+len(n.mu.byID)+len(n.mu.writing) != 0 || n.mu.bytes != 0 {
			t.Errorf("left: %d open promises, %d by number, %d reservations, %d bytes",
				len(n.mu.open), len(n.mu.byID), len(n.mu.writing), n.mu.bytes)
		}
		n.mu.Unlock()
		if s := d.Stats(); s.Pinned != 0 || s.Partial != 0 {
			t.Errorf("%d bytes are pinned, %d entries partial", s.Pinned, s.Partial)
		}
		check(t, d.Close())
	})
	n = &node{Pool: p, t: t, spec: specOf("model", 1)}
	n.space, err = p.OpenSpace(n.spec)
	check(t, err)
	return n, d
}

// tear removes the last page of the arena.
func tear(t *testing.T, d *dram.Pool) {
	t.Helper()
	_, fd := d.Arena()
	check(t, unix.Ftruncate(fd, tornBlocks<<10-4096))
}

// TestWriteBehindMeetsABadPage checks that the blocks in a page that cannot be read are dropped,
// everything else is written, and the tier goes on.
func TestWriteBehindMeetsABadPage(t *testing.T) {
	store := pooltest.NewShelf()
	n, d := newTorn(t, Tier{Name: "disk", Store: store, Local: true, Write: OnSecondUse})
	h := chain("a", tornBlocks)
	n.save(h)
	tear(t, d)
	n.Prefix(n.space, 0, h) // a use
	n.stored(0, tornBlocks-tornPage)
	n.waitFor("the rest is given up", func(*pool.TierReport) bool {
		return d.Stats().Entries == tornBlocks-tornPage
	})
	if s := d.Stats(); s.Bad.Pages != 1 || s.Bad.Dropped != tornPage {
		t.Errorf("%+v", s.Bad)
	}
	late := chain("late", 8)
	n.save(late)
	if got := n.load(late); got != 8 {
		t.Errorf("%d of 8 blocks that were saved later", got)
	}
	n.Prefix(n.space, 0, late)
	n.stored(0, tornBlocks-tornPage+8)
}

// TestFetchMeetsABadPage checks that the promise of a block that would use a bad page fails, and
// the others are fetched.
func TestFetchMeetsABadPage(t *testing.T) {
	store := pooltest.NewShelf()
	n, d := newTorn(t, Tier{Name: "disk", Store: store, Local: true, Write: OnSecondUse})
	h := chain("a", tornBlocks)
	n.save(h)
	n.Prefix(n.space, 0, h)
	n.stored(0, tornBlocks)
	push := n.batch(chain("push", tornBlocks), 0) // everything out of memory
	d.Reserve(push)
	for i := range push.Status {
		push.Status[i] = pool.Busy
	}
	d.Commit(push.Slots, push.Epoch, push.Status)
	tear(t, d)
	count, refs := n.settled(h)
	there := make([]bool, h.N)
	d.Exists(n.space, 0, h, there)
	arrived := 0
	for _, is := range there {
		if is {
			arrived++
		}
	}
	if s := d.Stats(); arrived == 0 || count != tornBlocks || s.Bad.Pages != 1 {
		t.Errorf("%d blocks came of %d promised, %+v", arrived, count, s.Bad)
	}
	n.Unpin(refs)
	for range 8 { // what did not come comes elsewhere, in what room there is
		_, refs := n.settled(h.Slice(0, tornBlocks-tornSlab))
		n.Unpin(refs)
	}
	if got := n.load(h.Slice(0, tornBlocks-tornSlab)); got != tornBlocks-tornSlab {
		t.Errorf("%d of %d blocks in what is left of memory", got, tornBlocks-tornSlab)
	}
}
