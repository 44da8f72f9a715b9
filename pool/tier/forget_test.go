package tier

import (
	"path/filepath"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// keeping is a memory with entries of an earlier process.
type keeping struct {
	*dram.Pool
	forgotten []pool.Fingerprint
}

func (k *keeping) Forget(fp pool.Fingerprint) error {
	k.forgotten = append(k.forgotten, fp)
	return nil
}

// TestForgetBeforeTheSpaceIsOpen checks that a reset before a space is open holds in memory and in
// the tiers, in this process and the next.
func TestForgetBeforeTheSpaceIsOpen(t *testing.T) {
	salts := filepath.Join(t.TempDir(), "salts")
	other := specOf("other", 1)
	var names [2]pool.Fingerprint
	for process := range names {
		m := openMemory(t, 200)
		k := &keeping{Pool: m}
		n := openNode(t, m, k, 1, Options{PrefetchBytes: 64 << 10, State: salts},
			[]Tier{{Name: "shared", Store: pooltest.NewShelf(), Write: OnSave}})
		if process == 0 {
			check(t, n.Forget(other.Fingerprint))
			if len(k.forgotten) != 1 || k.forgotten[0] != other.Fingerprint {
				t.Errorf("memory forgot %x", k.forgotten)
			}
		}
		id, err := n.OpenSpace(other)
		check(t, err)
		names[process] = n.spaces.get(id).now.Load().stored
	}
	if names[0] == other.Fingerprint || names[1] != names[0] {
		t.Errorf("names in the tiers %x, want twice the same one and not %x", names, other.Fingerprint)
	}
}
