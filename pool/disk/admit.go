package disk

import (
	"sync"

	"github.com/kvagent/kvagent/pool"
)

// MaxRemember bounds Admission.Remember.
const MaxRemember = 1 << 28

// Admission says which blocks are worth a write. Its zero value admits all. What it does to hits
// and bytes is in docs/TIERS.md.
type Admission struct {
	// Again admits a block only when it was used again: the Hint says so, or it is offered a second
	// time.
	Again bool
	// Tokens admits with Again also the blocks of a request of so many tokens, used again or not.
	// 0: no such rule.
	Tokens int
	// Remember is the number of blocks offered once that are remembered, 4 bytes each; default 1
	// Mi.
	Remember int
}

// Hint is what the caller knows of a block.
type Hint struct {
	Used   bool // it was loaded, or found by a look-up, since it was saved
	Tokens int  // of the request it was computed for
}

// seen remembers which blocks were offered, in a table where a newer one takes an older one's
// place. A collision admits a block too early, at one in 2^32.
type seen struct {
	mu    sync.Mutex
	marks []uint32
}

func newSeen(a Admission) *seen {
	if !a.Again {
		return &seen{}
	}
	orElse(&a.Remember, 1<<20)
	return &seen{marks: make([]uint32, a.Remember)}
}

func (s *seen) admits(o *Options, it *pool.Item) bool {
	a := o.Admission
	if !a.Again {
		return true
	}
	if o.Hint != nil {
		if h := o.Hint(it); h.Used || (a.Tokens > 0 && h.Tokens >= a.Tokens) {
			return true
		}
	}
	b := keyBytes(&it.Key)
	h := mix(stableHash(b[:]))
	mark := uint32(h>>32) | 1
	s.mu.Lock()
	defer s.mu.Unlock()
	at := &s.marks[h%uint64(len(s.marks))]
	if *at == mark {
		return true
	}
	*at = mark
	return false
}
