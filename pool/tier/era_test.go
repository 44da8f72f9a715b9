package tier

import (
	"path/filepath"
	"sync"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// TestEraHasTheLastName checks that an open space ends with the name that names gives it, in
// memory's epoch, whatever gives it names at once: resets, a close.
func TestEraHasTheLastName(t *testing.T) {
	const rounds = 30
	n := newNode(t, 64, 1, Options{State: filepath.Join(t.TempDir(), "resets")},
		Tier{Name: "disk", Store: pooltest.NewShelf(), Local: true, Write: OnSave})
	var all sync.WaitGroup
	repeat := func(f func()) {
		all.Go(func() {
			for range rounds {
				f()
			}
		})
	}
	fp := n.spec.Fingerprint
	for range 2 {
		repeat(func() {
			if id, open := n.openID(fp); open {
				_, _ = n.ResetSpace(id) // it may be closed by now
			}
		})
		repeat(func() { _ = n.Forget(fp) }) // as well
	}
	repeat(func() { n.renamed(fp) })
	repeat(func() {
		if id, open := n.openID(fp); open {
			_ = n.CloseSpace(id)
		}
		_, err := n.OpenSpace(n.spec)
		check(t, err)
	})
	all.Wait()
	id, open := n.openID(fp)
	if !open {
		t.Fatal("the space is closed")
	}
	want := era{stored: n.StoredAs(fp), epoch: n.Epoch(id)}
	if got := *n.spaces.get(id).now.Load(); got != want || got.stored == fp {
		t.Errorf("era %+v, want %+v", got, want)
	}
}

// TestSpaceOpenedDuringItsReset checks that a space that is closed and opened again while it is
// reset, and is told of the reset only then, has tiers after the reset.
func TestSpaceOpenedDuringItsReset(t *testing.T) {
	for name, reset := range map[string]func(*node) error{
		"open":      func(n *node) error { _, err := n.ResetSpace(n.space); return err },
		"not saved": func(n *node) error { return n.Forget(specOf("other", 1).Fingerprint) },
	} {
		t.Run(name, func(t *testing.T) {
			n, disk := stuckNode(t, pooltest.NewShelf())
			spec, saved := n.spec, error(nil)
			if name == "not saved" {
				spec, saved = specOf("other", 1), errMoody
			}
			done := make(chan error, 1)
			go func() { done <- reset(n) }()
			<-disk.asked
			if id, open := n.openID(spec.Fingerprint); open {
				check(t, n.CloseSpace(id))
			}
			id, err := n.OpenSpace(spec)
			check(t, err)
			n.resetting(spec.Fingerprint)
			disk.answer <- saved
			<-done // with an error: the space that was to be reset is closed, or the reset is not on disk
			off := saved != nil
			want := era{stored: n.StoredAs(spec.Fingerprint), epoch: n.Epoch(id), off: off}
			if got := *n.spaces.get(id).now.Load(); got != want || got.stored == spec.Fingerprint {
				t.Errorf("era %+v, want %+v", got, want)
			}
		})
	}
}

// watched is a memory that calls a function before it is reset.
type watched struct {
	*dram.Pool
	before func()
}

func (w *watched) ResetSpace(id pool.SpaceID) (uint32, error) {
	w.before()
	return w.Pool.ResetSpace(id)
}

// TestNoTierBeforeMemoryIsReset checks that a space whose new name is on disk has no tiers until
// its memory is reset as well. Otherwise what memory has would be stored under the new name.
func TestNoTierBeforeMemoryIsReset(t *testing.T) {
	m := openMemory(t, 200)
	w := &watched{Pool: m}
	disk := Tier{Name: "disk", Store: pooltest.NewShelf(), Local: true, Write: OnSave}
	n := openNode(t, m, w, 1, Options{PrefetchBytes: 64 << 10}, []Tier{disk})
	resets := 0
	w.before = func() {
		resets++
		if now := n.spaces.get(n.space).now.Load(); now.epoch != 0 {
			t.Errorf("memory is not reset yet, and the tiers are on: %+v", now)
		}
	}
	n.reset()
	check(t, n.Forget(n.spec.Fingerprint))
	if now := n.spaces.get(n.space).now.Load(); resets != 2 || now.epoch != 3 || now.off {
		t.Errorf("%d resets of memory, era %+v, want 2, and the tiers on in epoch 3", resets, now)
	}
}

// opening is a memory in which a space is opened right before it is reset as one that is not open.
type opening struct {
	*dram.Pool
	open func() pool.SpaceID
}

func (o *opening) Forget(pool.Fingerprint) error {
	_, err := o.ResetSpace(o.open())
	return err
}

// TestSpaceOpenedRightBeforeMemoryForgets checks that the era of a space follows memory's epoch,
// though memory was told to forget the space as one that is not open. Otherwise nothing that tiers
// have of it would be stored in memory any more.
func TestSpaceOpenedRightBeforeMemoryForgets(t *testing.T) {
	m := openMemory(t, 200)
	o := &opening{Pool: m}
	disk := Tier{Name: "disk", Store: pooltest.NewShelf(), Local: true, Write: OnSave}
	n := openNode(t, m, o, 1, Options{PrefetchBytes: 64 << 10}, []Tier{disk})
	late := specOf("late", 1)
	o.open = func() pool.SpaceID {
		id, err := n.OpenSpace(late)
		check(t, err)
		return id
	}
	check(t, n.Forget(late.Fingerprint))
	id, _ := n.openID(late.Fingerprint)
	want := era{stored: n.StoredAs(late.Fingerprint), epoch: n.Epoch(id)}
	if got := *n.spaces.get(id).now.Load(); got != want {
		t.Errorf("era %+v, want %+v", got, want)
	}
}
