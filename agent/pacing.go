package agent

import (
	"encoding/binary"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/transfer/pace"
)

// pacers are the pacers of the node: copies on one GPU do not slow the engines of another.
type pacers struct {
	setting int64

	mu struct {
		sync.Mutex
		ended bool
		all   map[cudaipc.UUID]*pace.Pacer // zero for the CPUs'
	}
}

func newPacers(setting int64, cpu *pace.Pacer) *pacers {
	p := &pacers{setting: setting}
	p.mu.all = map[cudaipc.UUID]*pace.Pacer{{}: cpu}
	return p
}

// of returns the pacer of a GPU, or that of the CPUs.
func (p *pacers) of(gpu cudaipc.UUID) *pace.Pacer {
	p.mu.Lock()
	defer p.mu.Unlock()
	one := p.mu.all[gpu]
	if one == nil {
		one = pace.New(p.setting, nil)
		p.mu.all[gpu] = one
		if p.mu.ended {
			one.End()
		}
	}
	return one
}

// end lifts all limits for good.
func (p *pacers) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.ended = true
	for _, one := range p.mu.all {
		one.End()
	}
}

// report returns the state of each pacer: the CPUs' first, then the GPUs' by their names.
func (p *pacers) report() []admin.Pace {
	p.mu.Lock()
	defer p.mu.Unlock()
	gpus := slices.SortedFunc(maps.Keys(p.mu.all), func(a, b cudaipc.UUID) int { return slices.Compare(a[:], b[:]) })
	out := make([]admin.Pace, 0, len(gpus))
	for _, gpu := range gpus {
		name := "cpu"
		if gpu != (cudaipc.UUID{}) {
			name = gpu.String()
		}
		out = append(out, admin.Pace{Device: name, Report: p.mu.all[gpu].Report()})
	}
	return out
}

// steps serves STEPS. The pacer of the worker's device compares the steps with the copies of the
// same time; a session that has no worker has none to compare.
func (s *session) steps(m *ipc.Steps) {
	st := s.seat.Load()
	if st == nil {
		return
	}
	if engine := st.steps.Load(); engine != nil {
		engine.Steps(decodeSteps(m.List, time.Now()))
	}
}

// decodeSteps returns the steps of a message that was sent now.
func decodeSteps(list []byte, now time.Time) []pace.Step {
	out := make([]pace.Step, 0, len(list)/ipc.StepBytes)
	for ; len(list) > 0; list = list[ipc.StepBytes:] {
		age, took := micros(list), micros(list[4:])
		end := now.Add(-age)
		out = append(out, pace.Step{Begin: end.Add(-took), End: end, Requests: binary.LittleEndian.Uint32(list[8:])})
	}
	return out
}

func micros(b []byte) time.Duration {
	return time.Duration(binary.LittleEndian.Uint32(b)) * time.Microsecond
}
