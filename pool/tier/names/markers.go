package names

import (
	"context"
	"errors"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

// Markers tell other nodes of resets. A reset puts a marker into each shared store, under a key
// made of the space's fingerprint and the epoch. Its existence is the message: nodes ask for
// markers beyond their own epochs, adopt the highest, and put back those that a store lost. One
// marker for an epoch is not enough, since a store may lose any of them and a node may miss any
// number of resets; asking for all has no bound. As in a Fenwick tree, a node in epoch m keeps the
// markers of
//
//	below(m) = m, m - lowbit(m), ...            at most 32 of them
//
// and a node in epoch n asks for those of
//
//	above(n) = n+1, (n+1) + lowbit(n+1), ...    at most 32 of them
//
// For every n < m the two sets share exactly one number, and it is above n: whatever was lost, a
// node that asks finds some later epoch, and after a few rounds the last one.
//
// The value of a marker names the reset that put it, and the first marker wins. If two nodes reset
// at once, the one that finds the other's marker resets again; what either stored before is then
// found by neither.

// markerValue returns the value of a marker: a header, and the nonce of the reset that made the
// epoch, or zero if a node puts back a marker that the store lost.
func (n *Names) markerValue(key *pool.Key, claim catalog.Nonce) []byte {
	value := append(make([]byte, transit.HeaderBytes), claim[:]...)
	length := uint32(len(claim))
	hd := transit.Header{
		Length: length,
		Sum:    pool.Sum(key.Seed(length), claim[:]),
		Node:   n.o.Node,
		When:   uint64(n.o.Clock().Unix()),
	}
	hd.Seal(key, value)
	return value
}

// askMarkers calls Exists in small batches. Keys that were not asked for keep Busy.
func (t *tier) askMarkers(ctx context.Context, keys []pool.Key) ([]pool.Status, error) {
	status := make([]pool.Status, len(keys))
	for i := range status {
		status[i] = pool.Busy
	}
	for from := 0; from < len(keys); from += followKeys {
		to := min(from+followKeys, len(keys))
		within, stop := context.WithTimeout(ctx, t.Within)
		err := t.Store.Exists(within, keys[from:to], status[from:to])
		stop()
		if err != nil {
			return status, err
		}
	}
	return status, nil
}

var errNoMarker = errors.New("the store neither took nor returned the marker of a reset")

// claim puts the marker of this node's reset. The first marker of an epoch wins. After an error the
// outcome is unknown.
func (t *tier) claim(ctx context.Context, f *followedSpace) (won bool, err error) {
	key := catalog.MarkerKey(f.fp, f.Epoch)
	value := t.names.markerValue(&key, f.Claim)
	items := []pool.Item{{Key: key, Data: value, Status: pool.Busy}}
	within, stop := context.WithTimeout(ctx, t.Within)
	defer stop()
	if err := t.Store.Put(within, items); err != nil || items[0].Status == pool.OK {
		return err == nil, err
	}
	if items[0].Status != pool.Exists {
		return false, errNoMarker
	}
	there := []pool.Item{{Key: key, Data: make([]byte, len(value)), Status: pool.Busy}}
	if err := t.Store.Get(within, there); err != nil {
		return false, err
	}
	switch there[0].Status {
	case pool.OK:
		_, bad := transit.Verify(&key, &key, there[0].Data)
		return bad == nil && catalog.Nonce(there[0].Data[transit.HeaderBytes:]) == f.Claim, nil
	case pool.Corrupt, pool.Invalid:
		return false, nil // not readable, so not known to be ours
	}
	return false, errNoMarker
}

// putMarkers puts markers that a store lost.
func (t *tier) putMarkers(ctx context.Context, fp pool.Fingerprint, epochs []uint64) error {
	if len(epochs) == 0 {
		return nil
	}
	items := make([]pool.Item, len(epochs))
	for i, epoch := range epochs {
		key := catalog.MarkerKey(fp, epoch)
		items[i] = pool.Item{Key: key, Data: t.names.markerValue(&key, catalog.Nonce{}), Status: pool.Busy}
	}
	within, stop := context.WithTimeout(ctx, t.Within)
	defer stop()
	if err := t.Store.Put(within, items); err != nil {
		return err
	}
	for i := range items {
		if items[i].Status != pool.OK && items[i].Status != pool.Exists {
			return errNoMarker
		}
	}
	return nil
}
