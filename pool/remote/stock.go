package remote

import (
	"sync"

	"github.com/kvagent/kvagent/pool"
)

// Stock is what a node stored in a store that does not say what it holds, less what it deleted. It is never below nothing: others store
// and delete too. Its methods may run at once.
type Stock struct {
	mu   sync.Mutex
	have pool.Usage
}

// Add counts items and their bytes; below 0 they were deleted.
func (s *Stock) Add(items, bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.have.Items = max(s.have.Items+items, 0)
	s.have.Bytes = max(s.have.Bytes+bytes, 0)
}

// Usage is what is counted.
func (s *Stock) Usage() pool.Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.have
}
