package remote

import (
	"sync"

	"github.com/kvagent/kvagent/pool"
)

// Stock counts what a node stored, less what it deleted, in a store that does not report its
// contents. It is never negative, although other nodes delete too. Its methods may run
// concurrently.
type Stock struct {
	mu   sync.Mutex
	have pool.Usage
}

// Add adds items and their bytes; negative numbers are deletions.
func (s *Stock) Add(items, bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.have.Items = max(s.have.Items+items, 0)
	s.have.Bytes = max(s.have.Bytes+bytes, 0)
}

// Usage returns the counts.
func (s *Stock) Usage() pool.Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.have
}
