package pool

import (
	"context"
	"errors"
)

// Lister is what a Store can do besides: name what it holds. It is slow, and for administration.
type Lister interface {
	// List calls found for every shard, until it gives false. What comes or goes meanwhile may be named, or not, or twice.
	List(ctx context.Context, found func(k Key, bytes int64) bool) error
}

// Errors of TierContents.
var (
	ErrNoTier   = errors.New("no such tier")
	ErrUnlisted = errors.New("this tier's store does not list what it holds")
)

// TierContents is what Tiers can do besides, for people: what one tier holds, and removing it from that tier alone. It asks the store whatever state
// the tier is in, until ctx ends.
type TierContents interface {
	// StoredAs is the name of a space in the tiers: its fingerprint, or another one after a reset on this node.
	StoredAs(space Fingerprint) Fingerprint
	// ListTier is Lister.List of the named tier; keys have the names that spaces have there.
	ListTier(ctx context.Context, tier string, found func(k Key, bytes int64) bool) error
	// DeleteIn is Store.Delete of such keys in the named tier.
	DeleteIn(ctx context.Context, tier string, keys []Key) error
}
