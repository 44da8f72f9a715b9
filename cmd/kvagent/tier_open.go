package main

import (
	"go.uber.org/zap"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
	"github.com/kvagent/kvagent/pool/tier"
)

// openedTier is a store that was opened by its spec.
type openedTier struct {
	store pool.Store
	local bool // its Exists answers from memory
	close func() error
}

// tierNeeds is what an opener is given.
type tierNeeds struct {
	spec    *tierSpec
	staging *tier.Staging // a store in another process may register it
	log     *zap.Logger
}

// told logs what a store of other machines shows of itself.
func (n *tierNeeds) told(store string) remote.Told {
	return func(from, to remote.State, reason error) {
		n.log.Warn(store, zap.Stringer("from", from), zap.Stringer("to", to), zap.Error(reason))
	}
}
