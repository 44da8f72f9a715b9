package tierspec

import (
	"go.uber.org/zap"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
	"github.com/kvagent/kvagent/pool/tier"
)

// Opened is a store that was opened by its spec.
type Opened struct {
	Store pool.Store
	Local bool // its Exists answers from memory
	Close func() error
}

// Needs is what an opener is given.
type Needs struct {
	Spec    *Spec
	Staging *tier.Staging // a store in another process may register it
	Log     *zap.Logger
}

// told logs what a store of other machines shows of itself.
func (n *Needs) told(store string) remote.Told {
	return func(from, to remote.State, reason error) {
		n.Log.Warn(store, zap.Stringer("from", from), zap.Stringer("to", to), zap.Error(reason))
	}
}
