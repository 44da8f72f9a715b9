package tier

import (
	"context"
	"fmt"
	"strings"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

var _ pool.TierContents = (*Pool)(nil)

// StoredAs implements pool.TierContents.
func (p *Pool) StoredAs(space pool.Fingerprint) pool.Fingerprint {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	return catalog.StoredName(space, p.spaces.kept.Spaces[space].Epoch)
}

// ListTier implements pool.TierContents.
func (p *Pool) ListTier(ctx context.Context, tier string, found func(k pool.Key, bytes int64) bool) error {
	l, err := p.laneNamed(tier)
	if err != nil {
		return err
	}
	lister, ok := l.Store.(pool.Lister)
	if !ok {
		return fmt.Errorf("tier %s: %w", tier, pool.ErrUnlisted)
	}
	if err := lister.List(ctx, found); err != nil {
		return fmt.Errorf("tier %s: %w", tier, err)
	}
	return nil
}

// DeleteIn implements pool.TierContents. What was known of the tier is forgotten, so that it is asked again.
func (p *Pool) DeleteIn(ctx context.Context, tier string, keys []pool.Key) error {
	l, err := p.laneNamed(tier)
	if err != nil {
		return err
	}
	err = l.Store.Delete(ctx, keys)
	l.known.clear()
	l.written.clear()
	if err != nil {
		return fmt.Errorf("tier %s: %w", tier, err)
	}
	return nil
}

func (p *Pool) laneNamed(name string) (*lane, error) {
	var names []string
	for _, l := range p.lanes {
		if l.Name == name {
			return l, nil
		}
		names = append(names, l.Name)
	}
	return nil, fmt.Errorf("tier %q: %w, allowed: %s", name, pool.ErrNoTier, strings.Join(names, ", "))
}

// clear forgets everything.
func (k *known) clear() {
	k.mu.Lock()
	defer k.mu.Unlock()
	clear(k.cells)
}
