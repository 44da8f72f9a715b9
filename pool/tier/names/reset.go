package names

import (
	"fmt"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// Reset gives a space its next name, and returns after that is on disk. After an error the space is
// Off until a later write to disk succeeds; the caller must not report the reset as done.
func (n *Names) Reset(fp pool.Fingerprint) error {
	return n.rename(fp, func(e *catalog.Space) error { return n.claimEpoch(e, e.Epoch+1) })
}

// claimEpoch sets an epoch as a reset of this node, with a claim if any tier is shared: other nodes
// may claim the epoch too.
func (n *Names) claimEpoch(e *catalog.Space, epoch uint64) (err error) {
	if epoch > catalog.MaxEpoch {
		return fmt.Errorf("tier epoch %d, allowed: at most %d", epoch, uint64(catalog.MaxEpoch))
	}
	e.Epoch, e.Claim, e.Confirmed = epoch, catalog.Nonce{}, nil
	if n.shared() {
		e.Claim, err = catalog.NewNonce()
	}
	return err
}

// shared reports whether some tier is used by other nodes.
func (n *Names) shared() bool {
	for _, t := range n.tiers {
		if !t.Local {
			return true
		}
	}
	return false
}

// rename gives a space another epoch, and so another name in the tiers, and saves the catalog. The
// tiers are not used for the space before it is on disk.
func (n *Names) rename(fp pool.Fingerprint, change func(*catalog.Space) error) error {
	n.changeMu.Lock()
	defer n.changeMu.Unlock()
	err := n.change(fp, change)
	n.o.Resetting(fp)
	if err != nil {
		return err
	}
	return n.save()
}

// change updates a space in the catalog. Until the catalog is saved the space is off in all tiers,
// whether it is open now or opened meanwhile.
func (n *Names) change(fp pool.Fingerprint, change func(*catalog.Space) error) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.off[fp] = true
	e := n.mu.catalog.Of(fp)
	if err := change(&e); err != nil {
		n.mu.failed[fp] = true
		return err
	}
	delete(n.mu.failed, fp)
	e.Forget, e.Used = true, n.o.Clock().Unix()
	n.mu.catalog.Put(fp, e, n.mu.open)
	n.mu.dirty = true
	return nil
}

// Unforgotten returns the spaces whose resets are on disk, and whose memory an earlier process may
// not have reset before it was killed.
func (n *Names) Unforgotten() (all []pool.Fingerprint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for fp, e := range n.mu.catalog.Spaces {
		if e.Forget {
			all = append(all, fp)
		}
	}
	return all
}

// Forgotten records that memory was reset after the space had got this tier epoch. It is on disk
// later: until then a next process resets memory once more.
func (n *Names) Forgotten(fp pool.Fingerprint, epoch uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.mu.catalog.Spaces[fp]; e.Forget && e.Epoch == epoch {
		e.Forget = false
		n.mu.catalog.Spaces[fp], n.mu.dirty = e, true
	}
}
