package agent

import (
	"cmp"
	"errors"
	"slices"

	"github.com/kvagent/kvagent/pool"
)

// A space that no engine uses stays open, because the next engine with the same identity can use
// its blocks. It is closed when nothing of it is stored, or when another space needs its place. Its
// number in the pool is never reused, so a look-up or pin with that number finds nothing. The
// epochs of a space that was reset are not reused either, so a save from before the reset stays
// stale.

// errSpaceClosed means that a space was closed before it could be reset.
var errSpaceClosed = errors.New("the space is closed: no engine uses it")

// unusedLocked records that the last seat of a space was vacated.
func (r *registry) unusedLocked(sp *space) {
	if sp.open.Load() == nil {
		r.removeLocked(sp, sp.epoch)
		return
	}
	r.unused++
	sp.unused = r.unused
	// With tiers a space that is not private stays, for `kvagent cache rm` to find it: they may
	// hold blocks that memory does not.
	if _, tiers := r.pool.(pool.Tiers); (!tiers || sp.spec.Private) && r.storedLocked(sp) == 0 {
		r.closeLocked(sp)
	}
}

// removeLocked removes a space from the registry in its last epoch.
func (r *registry) removeLocked(sp *space, last uint32) {
	sp.closed = true
	delete(r.spaces, sp.fp)
	if last > sp.first {
		r.past.add(sp.fp, last)
	}
}

// storedLocked counts the entries of an open space in memory.
func (r *registry) storedLocked(sp *space) int64 { return r.pool.SpaceEntries(sp.open.Load().ID) }

// makeRoomLocked closes one of the unused spaces: one of which nothing is stored, else the least
// recently used one. It returns false if there is none.
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

// closeLocked closes a space that no engine uses. It returns false while the space is being reset.
func (r *registry) closeLocked(sp *space) bool {
	if !sp.resetting.TryLock() {
		return false
	}
	defer sp.resetting.Unlock()
	id := sp.open.Load().ID
	r.removeLocked(sp, r.pool.Epoch(id))
	sp.open.Store(nil)
	r.publishLocked()
	// An error means that the pool is closed.
	if r.pool.CloseSpace(id) == nil {
		signal(r.swept)
	}
	return true
}

// sweep reclaims the memory of reset and closed spaces until the agent ends. It finishes a round
// that it has begun, whose time is proportional to the pool's size; a reset does not wait for it.
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

// maxPastEpochs bounds the removed spaces whose last weights epoch is kept. Beyond it, new spaces
// begin above the highest of them; an engine that sees this takes its space for one that was reset,
// and loses its own cached blocks.
const maxPastEpochs = 4096

// pastEpochs holds the last weights epochs of spaces that were reset and removed, so that none is
// reused. The registry's mutex guards it.
type pastEpochs struct {
	last  map[pool.Fingerprint]uint32
	floor uint32 // the highest of those dropped from last
}

// add records that a space was removed in its epoch last.
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

// next returns the first epoch of a space that is made now.
func (p *pastEpochs) next(fp pool.Fingerprint) uint32 { return max(p.floor, p.last[fp]) + 1 }
