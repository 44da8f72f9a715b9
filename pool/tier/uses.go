package tier

import (
	"context"
	"sync"

	"github.com/kvagent/kvagent/pool"
)

// uses queues the look-ups that found entries in memory, for the tiers that write on second use.
type uses struct {
	wake chan struct{} // cap 1

	mu      sync.Mutex
	waiting []use
	bytes   int
	dropped uint64
}

type use struct {
	space pool.SpaceID
	group uint8
	size  int    // bytes of a hash
	blob  []byte // the hashes, concatenated
	first pool.Hash
}

// add queues a chain. It drops the chain if there is no room.
func (u *uses) add(s pool.SpaceID, group uint8, h pool.Hashes) {
	size := h.N * h.Len
	u.mu.Lock()
	room := u.bytes+size <= usesBytes
	if room {
		u.bytes += size
	} else {
		u.dropped++
	}
	u.mu.Unlock()
	if !room {
		return
	}
	one := use{space: s, group: group, size: h.Len, blob: make([]byte, 0, size), first: parentOf(&h, 0)}
	for i := range h.N {
		one.blob = append(one.blob, h.At(i)...)
	}
	u.mu.Lock()
	u.waiting = append(u.waiting, one)
	u.mu.Unlock()
	select {
	case u.wake <- struct{}{}:
	default:
	}
}

func (u *uses) take() []use {
	u.mu.Lock()
	defer u.mu.Unlock()
	out := u.waiting
	u.waiting, u.bytes = nil, 0
	return out
}

// offerUses offers entries that were used again to the tiers that write on second use, until ctx
// ends.
func (p *Pool) offerUses(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.uses.wake:
		}
		for _, u := range p.uses.take() {
			p.offerUse(&u)
		}
	}
}

func (p *Pool) offerUse(u *use) {
	sp := p.spaces.get(u.space)
	if sp.group(u.group) == nil {
		return
	}
	o := origin{parent: u.first, sp: sp, era: sp.now.Load()}
	for from := 0; from < len(u.blob); from += u.size {
		hash := u.blob[from : from+u.size]
		o.key = entryKey{u.space, u.group, pool.MakeHash(hash)}
		p.offerUsed(&o)
		o.parent = o.key.hash
	}
}

// offerUsed offers an entry to the tiers that write on second use and were not given it lately.
func (p *Pool) offerUsed(o *origin) {
	digest, now := o.digest(), p.now()
	for _, l := range p.levels {
		if l.Write != OnSecondUse {
			continue
		}
		if there, _ := l.written.get(digest, now); !there {
			p.mu.Lock()
			l.offerLocked(*o)
			p.mu.Unlock()
		}
	}
}
