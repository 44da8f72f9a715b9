package agent

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
)

// space is shared by the engines with the same identity. The pool's space needs the block sizes of
// all shards, and a worker knows only those of its own, so the pool's space is opened when the last
// shard's sizes are claimed. A comment below says when it is closed. registry.mu guards all
// fields but the first and the last two.
type space struct {
	resetting sync.Mutex // one reset at a time, its notices included; taken before registry.mu

	fp         pool.Fingerprint
	identity   []byte            // canonical
	model      string            // for people
	pairs      map[string]string // the identity's pairs, for status; immutable
	groups     []ipc.GroupDesc
	hashTokens uint32

	sizes  [][]uint32 // by shard, then group: bytes of one block; nil: not known
	claims []int      // by shard: seats that claim its sizes
	seats  map[*seat]struct{}
	first  uint32 // its first weights epoch
	epoch  uint32 // until the pool's space opens; resets before that count
	spec   pool.Spec
	unused uint64 // registry.unused at the time when the last engine left
	closed bool   // removed from the registry; a new space may have its fingerprint

	open     atomic.Pointer[lookup.Space] // nil until the pool's space is open
	complete atomic.Int32                 // engines with all ranks registered
}

func newSpace(fp pool.Fingerprint, identity []byte, r *ipc.Register, epoch uint32) *space {
	pairs := identityMap(r.Identity)
	return &space{
		fp: fp, identity: identity, model: pairs["model"], pairs: pairs,
		groups: r.Groups, hashTokens: r.HashTokens,
		sizes: make([][]uint32, r.Shards), claims: make([]int, r.Shards),
		seats: make(map[*seat]struct{}), first: epoch, epoch: epoch,
	}
}

func identityMap(pairs []ipc.Pair) map[string]string {
	out := make(map[string]string, len(pairs))
	for _, p := range pairs {
		out[p.Key] = p.Value
	}
	return out
}

// claimLocked records the sizes of shards, which must agree with those already recorded, or none.
func (s *space) claimLocked(shards []uint32, sizes [][]uint32) error {
	for i, shard := range shards {
		known := s.sizes[shard]
		for g := range known {
			if known[g] != sizes[i][g] {
				return fmt.Errorf("segments: group %d, shard %d: %d bytes of one block, allowed: %d, as this space "+
					"has it", g, shard, sizes[i][g], known[g])
			}
		}
	}
	for i, shard := range shards {
		s.sizes[shard] = sizes[i]
		s.claims[shard]++
	}
	return nil
}

// disclaimLocked withdraws a claim. Unclaimed sizes are dropped unless the pool's space is open.
func (s *space) disclaimLocked(shards []uint32) {
	for _, shard := range shards {
		s.claims[shard]--
		if s.claims[shard] == 0 && s.open.Load() == nil {
			s.sizes[shard] = nil
		}
	}
}

// openLocked opens the pool's space if all sizes are known; otherwise it does nothing.
func (s *space) openLocked(p pool.Memory) error {
	if s.open.Load() != nil {
		return nil
	}
	for _, sizes := range s.sizes {
		if sizes == nil {
			return nil
		}
	}
	spec := s.makeSpec()
	id, err := p.OpenSpace(spec)
	if err != nil {
		return err
	}
	s.spec = spec
	s.open.Store(s.makeRules(id))
	return nil
}

func (s *space) makeSpec() pool.Spec {
	spec := pool.Spec{
		Fingerprint: s.fp, Identity: s.identity, Shards: len(s.sizes), FirstEpoch: s.epoch,
		Private: strings.HasPrefix(s.pairs["generation"], "private:"), // docs/PROTOCOL.md
	}
	for g := range s.groups {
		group := pool.Group{BlockTokens: s.groups[g].BlockTokens}
		for shard := range s.sizes {
			group.ShardBytes = append(group.ShardBytes, s.sizes[shard][g])
		}
		spec.Groups = append(spec.Groups, group)
	}
	return spec
}

func (s *space) makeRules(id pool.SpaceID) *lookup.Space {
	rules := &lookup.Space{ID: id, Print: s.fp, HashTokens: s.hashTokens}
	for _, g := range s.groups {
		rules.Groups = append(rules.Groups, lookup.Group{BlockTokens: g.BlockTokens, Window: g.Window})
	}
	return rules
}

// spaceField returns the log field of a fingerprint.
func spaceField(fp pool.Fingerprint) zap.Field { return zap.String("space", hex.EncodeToString(fp[:])) }

// A space that no engine uses stays open, because the next engine with the same identity can use
// its blocks. It is closed when nothing of it is stored, or when another space needs its place. Its
// number in the pool is never reused, so a look-up or pin with that number finds nothing. The
// epochs of a space that was reset are not reused either, so a save from before the reset stays
// stale: new spaces begin above the highest of them. An engine that comes back to another space
// then takes that for a reset, and loses its own cached blocks.

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
		r.floor = max(r.floor, last)
	}
}

// storedLocked counts the entries of an open space in memory.
func (r *registry) storedLocked(sp *space) int64 { return r.pool.SpaceEntries(sp.open.Load().ID) }

// makeRoomLocked closes one of the unused spaces: the one with fewest blocks in memory, of several
// the least recently used one. It returns false if there is none.
func (r *registry) makeRoomLocked() bool {
	var all []*space
	stored := make(map[*space]int64)
	for _, sp := range r.spaces {
		if len(sp.seats) == 0 {
			all = append(all, sp)
			stored[sp] = r.storedLocked(sp)
		}
	}
	slices.SortFunc(all, func(a, b *space) int {
		return cmp.Or(cmp.Compare(stored[a], stored[b]), cmp.Compare(a.unused, b.unused))
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

// resetSpace starts a new weights epoch of a space. by is the requesting session, or nil; who names
// the requester.
func (a *Agent) resetSpace(sp *space, by *session, who string) (uint32, error) {
	sp.resetting.Lock()
	defer sp.resetting.Unlock()
	at := time.Now() // before its blocks are dropped
	epoch, err := a.registry.reset(sp)
	if err != nil {
		if !errors.Is(err, errSpaceClosed) {
			a.log.Error("reset failed", spaceField(sp.fp), zap.Error(err))
		}
		return 0, err
	}
	a.metrics.Resets.Add(1)
	a.guests.Reset(sp.fp, at, who)
	a.notifyEpoch(sp, by, epoch, who)
	return epoch, nil
}

// adopted notifies the sessions of a space of its new epoch.
func (a *Agent) adopted(fp pool.Fingerprint) {
	const who = "another node"
	a.guests.Reset(fp, time.Now(), who)
	if sp := a.registry.space(fp); sp != nil {
		signal(a.registry.swept)
		a.notifyEpoch(sp, nil, a.registry.epochOf(sp), who)
	}
}

// notifyEpoch notifies the sessions of a space, but one, of its new epoch.
func (a *Agent) notifyEpoch(sp *space, but *session, epoch uint32, who string) {
	a.log.Info("new weights epoch", zap.String("model", sp.model), spaceField(sp.fp), zap.Uint32("epoch", epoch),
		zap.String("by", who))
	for _, s := range a.sessions.list() {
		if st := s.seat.Load(); s != but && st != nil && st.space == sp {
			s.notifyGreeted(&ipc.Epoch{Epoch: epoch})
		}
	}
}

// ResetStored starts a new epoch of a space for the operator, and returns the space's new state.
// stored is false if the space does not exist or was closed meanwhile, so that nothing of it is
// stored.
func (a *Agent) ResetStored(fp pool.Fingerprint) (now report.CacheSpace, stored bool, err error) {
	sp := a.registry.space(fp)
	if sp == nil {
		return now, false, nil
	}
	if _, err := a.resetSpace(sp, nil, "the operator"); err != nil {
		if errors.Is(err, errSpaceClosed) {
			err = nil
		}
		return now, false, err
	}
	return a.cacheSpace(sp), true, nil
}
