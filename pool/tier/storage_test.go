package tier

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/disk"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// watchedDisk is a disk that may refuse every call.
type watchedDisk struct {
	*moody
	pool.KeyJournal
}

// TestStorageNotesTheDisk: the journal of the disk tells what look-ups find there, and where to
// look when that changes: after a write, a delete, a reset, and while the disk is not used.
func TestStorageNotesTheDisk(t *testing.T) {
	for _, shards := range []int{1, 3} {
		path := filepath.Join(t.TempDir(), "disk")
		local, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: path, Bytes: 256 << 20}}})
		check(t, err)
		t.Cleanup(func() { check(t, local.Close()) })
		store := watchedDisk{&moody{Store: local}, local}
		n := newNode(t, 1000, shards, Options{}, Tier{
			Name: "disk", Store: store, Local: true, Write: OnSave, BreakFirst: time.Millisecond,
			BreakLast: time.Millisecond,
		})
		j := n.Storage()
		if j == nil {
			t.Fatal("a disk has no journal")
		}
		j.Watch(n.space)
		prompt := chain("prompt", 20)
		present := make([]bool, prompt.N)
		// comes waits until the first blocks, and no others, are known by notes alone.
		comes := func(what string, want int) {
			t.Helper()
			pooltest.Until(t, what, func() bool {
				select {
				case <-j.Changed():
				default:
				}
				list, lost := j.Changes(nil)
				for i := range prompt.N {
					noted := lost
					for _, c := range list {
						noted = noted || c.Space == n.space && c.Hash == pool.MakeHash(prompt.At(i))
					}
					if one := prompt.Slice(i, i+1); noted && !j.Holds(n.space, 0, one, present[i:i+1]) {
						t.Error("the space is not open")
					}
				}
				for i := range present {
					if present[i] != (i < want) {
						return false
					}
				}
				return true
			})
		}
		n.save(prompt.Slice(0, 12))
		comes("the blocks are on the disk", 12)
		store.fails.Store(true)
		l := n.levels[0]
		for l.up() {
			l.countResult(t.Context(), moves, errMoody)
		}
		comes("a disk that fails has nothing", 0)
		store.fails.Store(false)
		comes("the disk works again", 12)
		keys := []pool.Key{}
		for i := 8; i < 12; i++ {
			k := entryKey{group: 0, hash: pool.MakeHash(prompt.At(i))}
			keys = append(keys, n.spaces.get(n.space).now.Load().key(&k, uint8(shards-1)))
		}
		check(t, local.Delete(t.Context(), keys))
		comes("blocks that lack a shard are not there", 8)
		n.reset()
		comes("nothing is left after a reset", 0)
		n.save(prompt.Slice(0, 3))
		comes("blocks are written under the new name", 3)
		check(t, n.CloseSpace(n.space))
		if j.Holds(n.space, 0, prompt, present) || present[0] {
			t.Error("a closed space is open, or has blocks")
		}
	}
}

// TestNoStorage: shared stores, and local ones that note nothing, have no journal.
func TestNoStorage(t *testing.T) {
	n := newNode(t, 100, 1, Options{}, Tier{Name: "shelf", Store: pooltest.NewShelf(), Local: true},
		Tier{Name: "shared", Store: pooltest.NewShelf()})
	if j := n.Storage(); j != nil {
		t.Errorf("%T", j)
	}
}
