package tier

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/mem"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// lasting is a memory as the pool's file makes it: a next process has its blocks, too.
type lasting struct {
	*mem.Pool
	before func() // called before a reset
	forgot []pool.Fingerprint
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
	m, err := mem.Open(mem.Options{Bytes: 200 << 10})
	check(t, err)
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
