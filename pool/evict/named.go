package evict

import (
	"github.com/kvagent/kvagent/pool"
)

// Names of policies, the values of --eviction.
const (
	HazardName = "hazard"
	LRUName    = "lru"

	DefaultName = HazardName
)

// Names are all of them.
var Names = []string{HazardName, LRUName}

// Named makes the policy of a name.
func Named(eviction string) pool.Policy {
	if eviction == LRUName {
		return NewLRU()
	}
	return NewHazard()
}
