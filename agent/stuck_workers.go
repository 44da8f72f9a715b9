package agent

import (
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/contain"
	"github.com/kvagent/kvagent/ipc"
)

// stuckWorkers describes the workers whose current step is older than Limits.Stuck.
func (r *registry) stuckWorkers() (out []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.engines {
		for _, st := range e.ranks {
			if st == nil {
				continue
			}
			if step, age := st.step(); age > r.limits.Stuck {
				out = append(out, fmt.Sprintf("%s of instance %q (process %d): %s for %v", placeName(st.role, st.rank),
					e.instance, st.session.pid, step, age.Round(time.Millisecond)))
			}
		}
	}
	slices.Sort(out)
	return out
}

// Live returns an error that names the stuck workers.
func (a *Agent) Live() error {
	if stuck := a.registry.stuckWorkers(); len(stuck) > 0 {
		return errors.New("stuck: " + strings.Join(stuck, "; "))
	}
	return nil
}

// Places where a session's panic is caught, as labels of its counter.
const (
	panicReader     = "reader"     // a message is read and served
	panicWriter     = "writer"     // a message is sent
	panicCompletion = "completion" // a job that has ended is reported
	panicHeld       = "held"       // a held load is resumed
)

var panicPlaces = [...]string{panicReader, panicWriter, panicCompletion, panicHeld}

// protect runs a goroutine's work for one session. A panic ends that session as any other reason
// does: its jobs are cancelled, its regions closed, its leases dropped, its socket closed. A panic
// in code that holds state shared by sessions is raised again and ends the process, see
// package contain.
func (s *session) protect(where string, f func()) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		if shared := contain.SharedOnStack(); shared != "" {
			s.log.Error("panic over shared state: the process ends", zap.String("where", where),
				zap.String("in", shared),
				zap.Any("value", v))
			panic(v)
		}
		s.owner.metrics.Panics[where].Add(1)
		s.log.Error("panic: the session ends", zap.String("where", where), zap.Any("value", v), zap.ByteString("stack",
			debug.Stack()))
		s.terminate(endPanic, ipc.ErrCodeInternal,
			fmt.Errorf("a defect of the agent, in its %s; register again", where))
	}()
	f()
}
