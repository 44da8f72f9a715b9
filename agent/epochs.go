package agent

import (
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/events"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// epochs advances spaces' weights epochs, and notifies engines of them and of other nodes' resets.
type epochs struct {
	registry *registry
	metrics  *admin.Metrics
	log      *zap.Logger
	events   *events.Desk     // may be nil
	history  *history.History // may be nil
}

// reset starts a new weights epoch of a space. by is the requesting session, or nil; who names the
// requester.
func (e *epochs) reset(sp *space, by *session, who string) (uint32, error) {
	sp.resetting.Lock()
	defer sp.resetting.Unlock()
	at := time.Now() // before its blocks are dropped
	epoch, others, err := e.registry.reset(sp, by)
	if err != nil {
		if !errors.Is(err, errSpaceClosed) {
			e.log.Error("reset failed", spaceField(sp.fp), zap.Error(err))
		}
		return 0, err
	}
	e.events.Forget(sp.fp)
	e.metrics.Resets.Add(1)
	e.history.WasReset(history.Reset{At: at, Space: sp.fp, By: who})
	e.log.Info("new weights epoch", zap.String("model", sp.model), spaceField(sp.fp), zap.Uint32("epoch", epoch))
	for _, other := range others {
		other.notifyGreeted(&ipc.Epoch{Epoch: epoch})
	}
	return epoch, nil
}

// adopted notifies the sessions of a space of its new epoch.
func (e *epochs) adopted(fp pool.Fingerprint) {
	e.events.Forget(fp)
	sp, sessions := e.registry.sessionsOf(fp)
	if sp == nil {
		return
	}
	signal(e.registry.swept)
	epoch := e.registry.epochOf(sp)
	e.history.WasReset(history.Reset{At: time.Now(), Space: fp, By: "another node"})
	e.log.Info("new weights epoch: the space was reset on another node",
		zap.String("model", sp.model), spaceField(fp), zap.Uint32("epoch", epoch))
	for _, s := range sessions {
		s.notifyGreeted(&ipc.Epoch{Epoch: epoch})
	}
}

// sessionsOf returns a space and the sessions registered for it, or nil if it does not exist.
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
