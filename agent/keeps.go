package agent

import (
	"time"

	"github.com/kvagent/kvagent/agent/keep"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// keep serves KEEP, for blocks of the session's own space. It is ignored, and counted, without a
// registration, or with a pool that cannot keep blocks.
func (s *session) keep(m *ipc.Keep) {
	if rules := s.rules(); rules != nil && s.owner.keeps != nil {
		s.owner.keeps.Keep(&keep.Request{
			Space: rules.ID, Group: m.Group, Hashes: pool.Chain(m.Hashes, int(m.HashLen)),
			Pin: time.Duration(m.PinMS) * time.Millisecond, TTL: time.Duration(m.TTLMS) * time.Millisecond,
		})
		return
	}
	s.owner.metrics.KeepsIgnored.Add(1)
}

// keepReport returns the state of what is kept, of an agent that can.
func (a *Agent) keepReport() (r keep.Report) {
	if a.keeps != nil {
		r = a.keeps.Report()
	}
	return r
}
