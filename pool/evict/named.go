package evict

import "github.com/kvagent/kvagent/pool"

// Names of policies, the values of --eviction.
const (
	HazardName = "hazard"
	LRUName    = "lru"

	DefaultName = HazardName
)

// Names lists all of them.
var Names = []string{HazardName, LRUName}

// Named returns a new policy of this name.
func Named(eviction string) pool.Policy {
	if eviction == LRUName {
		return NewLRU()
	}
	return NewHazard()
}
