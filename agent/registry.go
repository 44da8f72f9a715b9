package agent

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/agent/lease"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// registry holds the engines with their seats, and the spaces. At every change it publishes an
// immutable view for look-ups, so that the hot path takes no lock.
type registry struct {
	pool       pool.Memory
	limits     *Limits
	leaseBytes int64
	swept      chan struct{} // cap 1: a space was reset or closed, and the pool has memory to reclaim

	mu      sync.Mutex
	engines map[string]*engine
	spaces  map[pool.Fingerprint]*space
	unused  uint64        // count of spaces whose last engine left, ever
	floor   uint32        // the highest epoch of a space that was reset and removed
	changed chan struct{} // closed and replaced whenever a seat is vacated

	view atomic.Pointer[view]
}

// view is what look-ups read: the spaces open in the pool, and the registered seats by session
// number.
type view struct {
	spaces map[pool.Fingerprint]*space
	seats  map[uint64]*seat
}

func newRegistry(p pool.Memory, limits *Limits, leaseBytes int64) *registry {
	r := &registry{
		pool: p, limits: limits, leaseBytes: leaseBytes, swept: make(chan struct{}, 1),
		engines: make(map[string]*engine), spaces: make(map[pool.Fingerprint]*space), changed: make(chan struct{}),
	}
	r.view.Store(&view{})
	return r
}

// admit gives a checked registration its seat. A conflicting seat or engine may belong to a
// predecessor that is being torn down, so admit waits up to Limits.Predecessor, or until ending is
// closed, before it refuses.
func (r *registry) admit(s *session, reg *ipc.Register, gone <-chan struct{}) (*seat, error) {
	deadline := time.NewTimer(r.limits.Predecessor)
	defer deadline.Stop()
	for {
		r.mu.Lock()
		changed := r.changed
		st, err := r.seatLocked(s, reg)
		r.mu.Unlock()
		if err == nil || errors.Is(err, pool.ErrIdentity) {
			return st, err
		}
		select {
		case <-changed:
		case <-deadline.C:
			return nil, err
		case <-gone:
			return nil, err
		}
	}
}

// seatLocked tries once.
func (r *registry) seatLocked(s *session, reg *ipc.Register) (*seat, error) {
	fp, identity := pool.Fingerprint(reg.Space()), reg.AppendIdentity(nil)
	sp, e := r.spaces[fp], r.engines[reg.Instance]
	switch {
	case sp != nil && !bytes.Equal(sp.identity, identity):
		return nil, fmt.Errorf("identity: another one has the fingerprint %x: %w", fp, pool.ErrIdentity)
	case sp == nil && len(r.spaces) >= r.limits.Spaces && !r.makeRoomLocked():
		return nil, fmt.Errorf("identity: engines use %d spaces, allowed: %d", len(r.spaces), r.limits.Spaces)
	case sp == nil:
		sp = newSpace(fp, identity, reg, r.floor+1)
	}
	if e == nil {
		if len(r.engines) >= r.limits.Engines {
			return nil, fmt.Errorf("instance: %d engines are registered, allowed: %d", len(r.engines), r.limits.Engines)
		}
		e = &engine{
			instance: reg.Instance, space: sp, world: reg.World, ranks: make([]*seat, reg.World),
			acct: lease.NewAccount(r.leaseBytes),
		}
	}
	if err := e.fits(reg, sp); err != nil {
		return nil, err
	}
	st := &seat{
		session: s, engine: e, space: sp, role: reg.Role, rank: reg.Rank, shards: slices.Clone(reg.Held),
		holder: lease.NewHolder(e.acct),
	}
	st.held.start = st.start
	*e.place(reg.Role, reg.Rank) = st
	r.engines[reg.Instance], r.spaces[fp] = e, sp
	sp.seats[st] = struct{}{}
	return st, nil
}

// claim records the block sizes of a worker's seat before any of its memory is opened.
func (r *registry) claim(st *seat) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := st.space.claimLocked(st.shards, st.sizes); err != nil {
		return err
	}
	st.claimed = true
	return nil
}

// activate makes a seat registered, opens the pool's space if all sizes are known now, and calls
// start for the workers that waited for that. On an error the seat is unchanged.
func (r *registry) activate(st *seat, start func(*seat) error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer signal(r.swept) // the pool may have closed another identity's space to make room in its file
	opened := st.space.open.Load() != nil
	if err := st.space.openLocked(r.pool); err != nil {
		return fmt.Errorf("segments: the pool does not open the space: %w", err)
	}
	st.registered = true
	defer r.publishLocked()
	if st.space.open.Load() == nil {
		return nil
	}
	for _, e := range r.engines {
		if e.space == st.space && !opened { // its budgets came before, and nothing was stored yet
			r.limitLocked(e)
		}
	}
	for other := range st.space.seats {
		if !other.registered || other.leaving || other.role != ipc.RoleWorker || other.worker.Load() != nil {
			continue
		}
		if err := start(other); err != nil && other == st {
			st.registered = false
			return err
		}
	}
	return nil
}

// leave hides a seat from look-ups. The seat stays taken until vacate. Its worker does not change
// afterwards.
func (r *registry) leave(st *seat) {
	r.mu.Lock()
	defer r.mu.Unlock()
	st.registered, st.leaving = false, true
	r.publishLocked()
}

// vacate frees a seat for a successor, once all its resources are released.
func (r *registry) vacate(st *seat) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, sp := st.engine, st.space
	if st.claimed {
		st.claimed = false
		sp.disclaimLocked(st.shards)
	}
	if owner := st.owner.Load(); owner != 0 { // what the worker stored stays its engine's
		r.pool.CloseOwner(pool.Owner(owner))
	}
	delete(sp.seats, st)
	*e.place(st.role, st.rank) = nil
	if e.scheduler == nil && !slices.ContainsFunc(e.ranks, func(s *seat) bool { return s != nil }) {
		delete(r.engines, e.instance)
	}
	if len(sp.seats) == 0 {
		r.unusedLocked(sp)
	}
	close(r.changed)
	r.changed = make(chan struct{})
	r.publishLocked()
}

// publishLocked rebuilds the view, and updates for each engine and space whether all ranks are
// registered.
func (r *registry) publishLocked() {
	v := &view{spaces: make(map[pool.Fingerprint]*space, len(r.spaces)), seats: make(map[uint64]*seat)}
	complete := make(map[*space]int32, len(r.spaces))
	for _, e := range r.engines {
		all := !slices.ContainsFunc(e.ranks, func(s *seat) bool {
			return s == nil || !s.registered || s.worker.Load() == nil
		})
		e.complete.Store(all)
		if all {
			complete[e.space]++
		}
	}
	for fp, sp := range r.spaces {
		sp.complete.Store(complete[sp])
		if sp.open.Load() != nil {
			v.spaces[fp] = sp
		}
		for st := range sp.seats {
			if st.registered {
				v.seats[st.session.number] = st
			}
		}
	}
	r.view.Store(v)
}

// reset starts a new weights epoch of a space. sp.resetting is held. mu is not held while the pool
// advances the epoch, which may wait for a disk.
func (r *registry) reset(sp *space) (epoch uint32, err error) {
	r.mu.Lock()
	closed := sp.closed // it stays so while sp.resetting is held
	r.mu.Unlock()
	if closed {
		return 0, errSpaceClosed
	}
	defer signal(r.swept)
	if sp.open.Load() == nil {
		// A reset applies to what a pool that outlives the agent has stored of it, too, and must
		// not be lost with this process.
		if err := r.pool.Forget(sp.fp); err != nil {
			return 0, err
		}
	}
	r.mu.Lock()
	rules := sp.open.Load()
	if rules == nil {
		sp.epoch++
	}
	epoch = sp.epoch
	r.mu.Unlock()
	if rules != nil {
		return r.pool.ResetSpace(rules.ID)
	}
	return epoch, nil
}

// epochOf returns a space's current weights epoch.
func (r *registry) epochOf(sp *space) uint32 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if rules := sp.open.Load(); rules != nil {
		return r.pool.Epoch(rules.ID)
	}
	return sp.epoch
}

// signal sets a flag that is a channel of capacity 1.
func signal(flag chan struct{}) {
	select {
	case flag <- struct{}{}:
	default:
	}
}
