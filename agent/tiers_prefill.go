package agent

import (
	"time"

	"github.com/kvagent/kvagent/ipc"
)

// stepPace is what a worker's saves tell of how fast it computes. The blocks that a step completed are saved with its number when it has been launched, and the next
// step is launched when there is room behind it: so between the first saves of two steps that follow on each other lies the time of the second. The session's reader owns it.
type stepPace struct {
	step   uint64 // the latest with a save
	at     time.Time
	before time.Time // when the step before it was saved; zero: it was not
	tokens int       // of group 0, saved in it so far
}

// saved notes a save. When a step is over of which the one before was seen too, it gives its tokens and its time; else 0.
func (p *stepPace) saved(step uint64, tokens int, now time.Time) (computed int, took time.Duration) {
	if step == p.step && !p.at.IsZero() {
		p.tokens += tokens
		return 0, 0
	}
	if !p.before.IsZero() {
		computed, took = p.tokens, p.at.Sub(p.before)
	}
	before := time.Time{}
	if step == p.step+1 {
		before = p.at
	}
	*p = stepPace{step: step, at: now, before: before, tokens: tokens}
	return computed, took
}

// tellPace tells the tiers how fast the session's engine computes.
func (s *session) tellPace(m *ipc.Save) {
	st := s.seat.Load()
	if s.agent.tiers == nil || st == nil {
		return
	}
	open := st.space.open.Load()
	if open == nil {
		return
	}
	blocks := 0
	for i := range m.Sections {
		if m.Sections[i].Group == 0 {
			blocks += len(m.Sections[i].Blocks) / blockBytes
		}
	}
	if tokens, took := s.pace.saved(m.Step, blocks*int(open.Groups[0].BlockTokens), time.Now()); tokens > 0 {
		s.agent.tiers.Computed(open.ID, tokens, took)
	}
}
