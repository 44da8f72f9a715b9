package agent

import (
	"cmp"
	"errors"
	"slices"

	"github.com/kvagent/kvagent/pool"
)

// A space that no engine uses stays open: its blocks are what the next engine with the same identity hopes for. It is closed when
// nothing of it is stored, or when another one needs its place. Its number in the pool is never used again, so that a look-up or a
// pin that still has it finds nothing; and neither are the epochs of one that was reset, so that a save from before the reset is never of its time again.

// errSpaceClosed says that a space was closed before it could be reset.
var errSpaceClosed = errors.New("the space is closed: no engine uses it")

// unusedLocked notes that the last seat of a space is free.
func (r *registry) unusedLocked(sp *space) {
	if sp.open.Load() == nil {
		r.goneLocked(sp, sp.epoch)
		return
	}
	r.unused++
	sp.unused = r.unused
	// With tiers the space stays, for `kvagent cache rm` to find it: they may hold blocks that memory does not.
	if _, tiers := r.pool.(pool.Tiers); !tiers && r.storedLocked(sp) == 0 {
		r.closeLocked(sp)
	}
}

// goneLocked takes a space out of the registry in its last epoch.
func (r *registry) goneLocked(sp *space, last uint32) {
	sp.closed = true
	delete(r.spaces, sp.fp)
	if last > sp.first {
		r.past.add(sp.fp, last)
	}
}

// storedLocked counts the entries of an open space in memory; -1: the pool does not count them.
func (r *registry) storedLocked(sp *space) int64 {
	if counts, ok := r.pool.(pool.SpaceCounter); ok {
		return counts.SpaceEntries(sp.open.Load().ID)
	}
	return -1
}

// makeRoomLocked closes one of the spaces that no engine uses: one of which nothing is stored, else the one that was used
// least recently. False: there is none.
func (r *registry) makeRoomLocked() bool {
	var all []*space
	stored := make(map[*space]bool)
	for _, sp := range r.spaces {
		if len(sp.seats) == 0 {
			all = append(all, sp)
			stored[sp] = r.storedLocked(sp) != 0
		}
	}
	slices.SortFunc(all, func(a, b *space) int {
		switch {
		case stored[b] && !stored[a]:
			return -1
		case stored[a] && !stored[b]:
			return 1
		}
		return cmp.Compare(a.unused, b.unused)
	})
	return slices.ContainsFunc(all, r.closeLocked)
}

// closeLocked closes a space that no engine uses. False: it is just being reset.
func (r *registry) closeLocked(sp *space) bool {
	if !sp.resetting.TryLock() {
		return false
	}
	defer sp.resetting.Unlock()
	id := sp.open.Load().ID
	r.goneLocked(sp, r.pool.Epoch(id))
	sp.open.Store(nil)
	r.publishLocked()
	// A pool that does not close it has been closed itself.
	if r.pool.CloseSpace(id) == nil {
		signal(r.swept)
	}
	return true
}

// sweep gives the memory of what was reset or closed back to the pool, until the agent ends. What it has begun it ends, which takes as long as
// the pool is large; the asker of a reset does not wait for it.
func (a *Agent) sweep() {
	for {
		select {
		case <-a.registry.swept:
			a.pool.Sweep()
		case <-a.stop:
			return
		}
	}
}

// maxPastEpochs is of how many spaces that are gone the last weights epoch is kept. Beyond it all spaces made from then on begin above all of them; an
// engine that lives through that takes its space for one that was reset, which costs it what it has cached itself.
const maxPastEpochs = 4096

// pastEpochs are the last weights epochs of spaces that were reset and are gone, so that none comes back. The registry's mutex guards it.
type pastEpochs struct {
	last  map[pool.Fingerprint]uint32
	floor uint32 // of those that are not in last any more, the highest
}

// add notes that a space is gone in its epoch last.
func (p *pastEpochs) add(fp pool.Fingerprint, last uint32) {
	if len(p.last) >= maxPastEpochs {
		for _, epoch := range p.last {
			p.floor = max(p.floor, epoch)
		}
		p.last = nil
	}
	if p.last == nil {
		p.last = make(map[pool.Fingerprint]uint32)
	}
	p.last[fp] = last
}

// next is the first epoch of a space that is made now.
func (p *pastEpochs) next(fp pool.Fingerprint) uint32 { return max(p.floor, p.last[fp]) + 1 }
