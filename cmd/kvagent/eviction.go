package main

import (
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/evict"
)

// Words of --eviction.
const (
	evictHazard = "hazard"
	evictLRU    = "lru"

	defaultEviction = evictHazard
)

var evictions = []string{evictHazard, evictLRU}

// newPolicy makes the policy of a word.
func newPolicy(eviction string) pool.Policy {
	if eviction == evictLRU {
		return evict.NewLRU()
	}
	return evict.NewHazard()
}
