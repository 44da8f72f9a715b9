package agent

import (
	"strings"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// Tiers hear which spaces have engines, so that they can collect what unused ones leave behind;
// and a reset on another node, which they hear of, is told to this node's engines like one of its
// own.

// generationOf is the kind of an identity's generation (docs/PROTOCOL.md). One that is not known is
// never collected.
func generationOf(generation string) pool.Generation {
	switch {
	case strings.HasPrefix(generation, "private:"):
		return pool.PrivateGeneration
	case strings.HasPrefix(generation, "named:"):
		return pool.NamedGeneration
	}
	return pool.BaseGeneration
}

// usedLocked tells the tiers that a space has its first seat.
func (r *registry) usedLocked(sp *space) {
	if use, ok := r.pool.(pool.SpaceUse); ok && len(sp.seats) == 1 {
		use.InUse(sp.fp, generationOf(sp.says["generation"]))
	}
}

// leftLocked tells the tiers that a space has no seat any more.
func (r *registry) leftLocked(sp *space) {
	if use, ok := r.pool.(pool.SpaceUse); ok && len(sp.seats) == 0 {
		use.NotInUse(sp.fp)
	}
}

// watchAdopted has the pool's tiers say which resets of other nodes they took over; off: not any
// more.
func (a *Agent) watchAdopted(on bool) {
	use, ok := a.pool.(pool.SpaceUse)
	switch {
	case !ok:
	case on:
		use.OnAdopted(a.adopted)
	default:
		use.OnAdopted(nil)
	}
}

// adopted tells the sessions of a space of its new epoch.
func (a *Agent) adopted(fp pool.Fingerprint) {
	sp, sessions := a.registry.sessionsOf(fp)
	if sp == nil {
		return
	}
	signal(a.registry.swept)
	epoch := a.registry.epochOf(sp)
	a.log.Info("new weights epoch: the space was reset on another node",
		zap.String("model", sp.model), spaceField(fp), zap.Uint32("epoch", epoch))
	for _, s := range sessions {
		s.tell(&ipc.Epoch{Epoch: epoch})
	}
}

// sessionsOf is a space with the sessions that are registered for it; nil: it is not here.
func (r *registry) sessionsOf(fp pool.Fingerprint) (sp *space, sessions []*session) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if sp = r.spaces[fp]; sp == nil {
		return nil, nil
	}
	for st := range sp.seats {
		if st.registered {
			sessions = append(sessions, st.session)
		}
	}
	return sp, sessions
}
