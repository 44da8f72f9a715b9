package disk

import (
	"sync"

	"github.com/kvagent/kvagent/pool"
)

// MaxRemember bounds Admission.Remember.
const MaxRemember = 1 << 28

// Admission decides which blocks are worth a write. Its zero value admits all. docs/TIERS.md has
// its effect on hits and bytes.
type Admission struct {
	// Again admits a block only if it was used again (Hint.Used), or is offered a second time.
	Again bool
	// Tokens, with Again, also admits the blocks of a request of at least so many tokens. 0: no
	// such rule.
	Tokens int
	// Remember is the number of blocks remembered that were offered once, 4 bytes each; default 1
	// Mi.
	Remember int
}

// Hint is what the caller knows of a block.
type Hint struct {
	Used   bool // it was loaded, or found by a look-up, since it was saved
	Tokens int  // of the request it was computed for
}

// seen remembers which blocks were offered, in a table where a newer one replaces an older one. A
// collision admits a block too early, with a probability of 2^-32.
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
