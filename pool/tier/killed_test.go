package tier

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// lasting is a memory as the pool's file makes it: a next process has its blocks, too.
type lasting struct {
	*dram.Pool
	before  func()             // called before a reset
	closing func(pool.SpaceID) // called before a close; may be nil
	forgot  []pool.Fingerprint
}

// CloseSpace calls closing first.
func (l *lasting) CloseSpace(id pool.SpaceID) error {
	if l.closing != nil {
		l.closing(id)
	}
	return l.Pool.CloseSpace(id)
}

func (l *lasting) ResetSpace(id pool.SpaceID) (uint32, error) {
	l.before()
	return l.Pool.ResetSpace(id)
}

// Forget implements pool.Forgetter for spaces that are not open.
func (l *lasting) Forget(fp pool.Fingerprint) error {
	l.before()
	l.forgot = append(l.forgot, fp)
	return nil
}

// newLasting makes an empty one.
func newLasting(t *testing.T, before func()) *lasting {
	m := openMemory(t, 200)
	return &lasting{Pool: m, before: before}
}

// forgets opens a pool on a file of resets, as a process does that follows one that was killed, and
// returns the spaces whose blocks it drops from its memory.
func forgets(t *testing.T, state string, tiers ...Tier) []pool.Fingerprint {
	l := newLasting(t, func() {})
	p, err := Open(l, tiers, Options{State: state, PrefetchBytes: 64 << 10})
	check(t, err)
	check(t, p.Close())
	check(t, l.Close())
	return l.forgot
}

// TestKilledBeforeMemoryIsReset checks that a process that is killed when a reset is on disk, and
// memory has not been reset, leaves that to the next one: else that would find what was reset, and
// write it to the tiers under the new name.
func TestKilledBeforeMemoryIsReset(t *testing.T) {
	for name, reset := range map[string]func(n *node, other *node){
		"reset":     func(n, _ *node) { n.reset() },
		"not open":  func(n, _ *node) { check(t, n.Forget(specOf("other", 1).Fingerprint)) },
		"elsewhere": func(_, other *node) { other.reset() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				shared := sharing(pooltest.NewShelf())
				state := filepath.Join(t.TempDir(), "resets")
				killed := state + ".killed"
				l := newLasting(t, func() {
					text, err := os.ReadFile(state)
					check(t, err)
					check(t, os.WriteFile(killed, text, 0o600))
				})
				n := openNode(t, l.Pool, l, 1, Options{State: state, PrefetchBytes: 64 << 10}, []Tier{shared})
				other := newNode(t, 200, 1, Options{Node: "other"}, shared)
				want := n.spec.Fingerprint
				if name == "not open" {
					want = specOf("other", 1).Fingerprint
				}
				reset(n, other)
				time.Sleep(3 * n.o.EpochEvery)
				synctest.Wait()
				if got := forgets(t, killed, shared); !slices.Equal(got, []pool.Fingerprint{want}) {
					t.Errorf("the next process forgets %x, want %x", got, want)
				}
				check(t, n.Pool.Close())
				if got := forgets(t, state, shared); len(got) != 0 {
					t.Errorf("after a reset that has ended, the next process forgets %x", got)
				}
			})
		})
	}
}

// TestNoTierBeforeMemoryForgets checks that a space that is opened while it is reset has no tiers
// until memory was reset: it has what an earlier process stored before the reset.
func TestNoTierBeforeMemoryForgets(t *testing.T) {
	disk := &stuck{asked: make(chan *catalog.Catalog, 1), answer: make(chan error, 1)}
	resets := 0
	var n *node
	l := newLasting(t, func() {
		resets++
		if id, open := n.openID(specOf("late", 1).Fingerprint); open {
			if now := n.spaces.get(id).now.Load(); now.epoch != 0 && !now.off {
				t.Errorf("memory is not reset yet, and the tiers are on: %+v", now)
			}
		}
	})
	shelf := Tier{Name: "disk", Store: pooltest.NewShelf(), Local: true, Write: OnSave}
	n = openNode(t, l.Pool, l, 1, Options{PrefetchBytes: 64 << 10, EpochEvery: time.Hour, file: disk}, []Tier{shelf})
	late, done := specOf("late", 1), make(chan error, 1)
	go func() { done <- n.Forget(late.Fingerprint) }()
	<-disk.asked
	id, err := n.OpenSpace(late)
	check(t, err)
	disk.answer <- nil
	check(t, <-done)
	want := era{stored: n.StoredAs(late.Fingerprint), epoch: n.Epoch(id)}
	if got := *n.spaces.get(id).now.Load(); got != want || resets != 1 {
		t.Errorf("era %+v after %d resets of memory, want %+v after one", got, resets, want)
	}
}

// TestClosedDuringItsReset checks that a space that is closed while a reset of it begins has tiers
// when it is opened again.
func TestClosedDuringItsReset(t *testing.T) {
	l := newLasting(t, func() {})
	shelf := Tier{Name: "disk", Store: pooltest.NewShelf(), Local: true, Write: OnSave}
	n := openNode(t, l.Pool, l, 1, Options{PrefetchBytes: 64 << 10}, []Tier{shelf})
	done := make(chan error, 1)
	l.closing = func(id pool.SpaceID) {
		go func() {
			_, err := n.ResetSpace(id)
			done <- err
		}()
		for n.names.Epoch(n.spec.Fingerprint) == 0 {
			runtime.Gosched()
		}
	}
	check(t, n.CloseSpace(n.space))
	if <-done == nil {
		t.Error("a space that was closed is reset")
	}
	id, err := n.OpenSpace(n.spec)
	check(t, err)
	if now := n.spaces.get(id).now.Load(); now.off {
		t.Errorf("the tiers are off: %+v", now)
	}
}

// TestOpenedDuringAResetThatIsNotKept checks that a space that is opened while its reset is not
// saved has tiers once that is saved.
func TestOpenedDuringAResetThatIsNotKept(t *testing.T) {
	disk := &stuck{asked: make(chan *catalog.Catalog, 1), answer: make(chan error, 1)}
	l := newLasting(t, func() {})
	shelf := Tier{Name: "disk", Store: pooltest.NewShelf(), Local: true, Write: OnSave}
	n := openNode(t, l.Pool, l, 1, Options{PrefetchBytes: 64 << 10, EpochEvery: time.Hour, file: disk}, []Tier{shelf})
	late, failed := specOf("late", 1), make(chan error, 1)
	go func() { failed <- n.Forget(late.Fingerprint) }()
	<-disk.asked
	id, err := n.OpenSpace(late)
	check(t, err)
	disk.answer <- errMoody
	if <-failed == nil {
		t.Error("a reset that was not kept is acknowledged")
	}
	saved := make(chan error, 1)
	go func() { saved <- n.Forget(specOf("other", 1).Fingerprint) }()
	<-disk.asked
	disk.answer <- nil
	check(t, <-saved)
	pooltest.Until(t, "the tiers", func() bool { return !n.spaces.get(id).now.Load().off })
}
