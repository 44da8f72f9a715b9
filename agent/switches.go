package agent

import (
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
)

// switches turn loads and saves off and on at run time, without touching an engine. mu orders changes with the
// notices of them, so that the last notice a session gets is true.
type switches struct {
	mu           sync.Mutex
	loads, saves atomic.Bool
}

// Set switches loads and saves; nil leaves one as it is. Every session is told.
func (a *Agent) Set(loads, saves *bool) admin.SwitchState {
	a.switches.mu.Lock()
	defer a.switches.mu.Unlock()
	before := a.switches.state()
	if loads != nil {
		a.switches.loads.Store(*loads)
	}
	if saves != nil {
		a.switches.saves.Store(*saves)
	}
	now := a.switches.state()
	if now == before {
		return now
	}
	a.log.Info("switched", zap.Bool("loads", now.Loads), zap.Bool("saves", now.Saves))
	for _, s := range a.sessions.all() {
		s.tell(switchesMessage(now))
	}
	return now
}

func (s *switches) state() admin.SwitchState {
	return admin.SwitchState{Loads: s.loads.Load(), Saves: s.saves.Load()}
}

func switchesMessage(s admin.SwitchState) *ipc.Switches {
	return &ipc.Switches{Loads: s.Loads, Saves: s.Saves}
}

// welcome tells a session that has agreed on a version what is switched on.
func (a *Agent) welcome(s *session) {
	a.switches.mu.Lock()
	defer a.switches.mu.Unlock()
	s.greeted.Store(true)
	s.tell(switchesMessage(a.switches.state()))
}
