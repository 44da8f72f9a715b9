package mover

import (
	"encoding/json"

	"github.com/kvagent/kvagent/cudaipc"
)

// facts are what the next process is told of its GPU, and whether it is to find out: only the first is, for what it does then may be
// what it is lost by.
func (m *Mover) facts() (measure bool, facts cudaipc.GPUFacts) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	switch {
	case m.mu.facts != nil:
		return false, *m.mu.facts
	case !m.opts.Measure:
		return false, cudaipc.GPUFacts{}
	case m.mu.history.starts > 1:
		return false, cudaipc.GPUFacts{Problem: "nothing was measured: the process that was to do it was lost"}
	}
	return true, cudaipc.GPUFacts{}
}

// inform tells on what a device said of itself, and keeps its facts for the processes that follow.
func (m *Mover) inform(text []byte) {
	var info cudaipc.CUDAInfo
	if len(text) == 0 || json.Unmarshal(text, &info) != nil {
		return // the host's device says nothing
	}
	m.mu.Lock()
	if m.mu.facts == nil {
		m.mu.facts = &info.Facts
	}
	m.mu.Unlock()
	if m.opts.Informed != nil {
		m.opts.Informed(info)
	}
}
