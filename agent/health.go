package agent

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
)

// watchdog knows how old each worker's current step is. Health is asked of the workers when somebody asks; the
// goroutine only logs when one gets stuck, and when it moves again.
type watchdog struct {
	registry *registry
	limit    time.Duration // a step older than this is stuck
	log      *zap.Logger
	stuck    map[*seat]stuckStep // said to be stuck; the goroutine's
}

// stuckStep is a worker whose step is older than Limits.Stuck.
type stuckStep struct {
	seat *seat
	step string
	age  time.Duration
}

func (s stuckStep) String() string {
	return fmt.Sprintf("%s of instance %q (process %d): %s for %v", placeName(s.seat.role, s.seat.rank),
		s.seat.engine.instance, s.seat.session.pid, s.step, s.age.Round(time.Millisecond))
}

func newWatchdog(r *registry, limit time.Duration, log *zap.Logger) *watchdog {
	return &watchdog{registry: r, limit: limit, log: log, stuck: make(map[*seat]stuckStep)}
}

// run looks until stop is closed.
func (w *watchdog) run(every time.Duration, stop <-chan struct{}) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			w.look()
		case <-stop:
			return
		}
	}
}

// look logs what changed.
func (w *watchdog) look() {
	now := make(map[*seat]stuckStep)
	for _, s := range w.stuckWorkers() {
		now[s.seat] = s
		if _, before := w.stuck[s.seat]; !before {
			w.log.Error("worker stuck", zap.Stringer("worker", s))
		}
	}
	for st, s := range w.stuck {
		if _, still := now[st]; !still {
			w.log.Info("worker moves again, or is gone", zap.Stringer("worker", s))
		}
	}
	w.stuck = now
}

// stuckWorkers are the workers whose current step is older than Limits.Stuck, by instance and rank.
func (w *watchdog) stuckWorkers() []stuckStep {
	w.registry.mu.Lock()
	defer w.registry.mu.Unlock()
	var out []stuckStep
	for _, e := range w.registry.engines {
		for _, st := range e.ranks {
			if st == nil {
				continue
			}
			if step, age := st.step(); age > w.limit {
				out = append(out, stuckStep{st, step, age})
			}
		}
	}
	slices.SortFunc(out, func(x, y stuckStep) int {
		return cmp.Or(cmp.Compare(x.seat.engine.instance, y.seat.engine.instance), cmp.Compare(x.seat.rank, y.seat.rank))
	})
	return out
}

// Live says which workers are stuck.
func (a *Agent) Live() error {
	stuck := a.watchdog.stuckWorkers()
	if len(stuck) == 0 {
		return nil
	}
	names := make([]string, len(stuck))
	for i, s := range stuck {
		names[i] = s.String()
	}
	return errors.New("stuck: " + strings.Join(names, "; "))
}

// Ready says why the agent does not serve: its sockets are not open or were removed, it drains, its
// pool has no room at all, too much of its memory is bad, or a mover that worked does not come
// back.
func (a *Agent) Ready() error {
	switch {
	case a.switches.draining():
		return errors.New("draining")
	case !a.ready.Load():
		return errors.New("the sockets are not open yet")
	case a.pool.Stats().Capacity <= 0:
		return errors.New("the pool has no capacity")
	case !a.listener.Reachable():
		return errors.New("session.sock was removed or replaced: no engine can come any more, start the agent again")
	}
	if err := a.memoryProblem(); err != nil {
		return err
	}
	return a.moverProblem()
}

// memoryProblem says that too many pages of the pool cannot be read. What is left of it goes on.
func (a *Agent) memoryProblem() error {
	s := a.pool.Stats()
	if s.Bad.Healthy() {
		return nil
	}
	return fmt.Errorf("%d pages of the pool cannot be read (limit %d), and %d bytes are not used for it (limit %d): "+
		"check the node's memory", s.Bad.Pages, s.Bad.MaxPages, s.Bad.Bytes, s.Bad.MaxBytes)
}

// lostPeer ends the session of a worker whose memory was open in a process that is no more. Its copies have ended; the
// engine hears why, and registers again.
func (a *Agent) lostPeer(id cudaipc.PeerID, why error) {
	if s := a.memory.peers.owner(id); s != nil {
		s.doom(endDevice, ipc.ErrCodeInternal, fmt.Errorf("the worker's memory is not open any more; register again: %w", why))
	}
}

// movers are the processes that the device has; none if it is in this one.
func (a *Agent) movers() []cudaipc.MoverState {
	if d, ok := a.device.(interface{ Movers() []cudaipc.MoverState }); ok {
		return d.Movers()
	}
	return nil
}

// MoverPIDs are the movers that run.
func (a *Agent) MoverPIDs() (pids []int) {
	for _, m := range a.movers() {
		if m.Pid != 0 {
			pids = append(pids, m.Pid)
		}
	}
	return pids
}

// moverProblem says which movers do not come back.
func (a *Agent) moverProblem() error {
	var failing []string
	for _, m := range a.movers() {
		if m.Failing {
			failing = append(failing, fmt.Sprintf("%s: %v", m.Name, m.LastLoss))
		}
	}
	if len(failing) == 0 {
		return nil
	}
	return fmt.Errorf("movers fail again and again: %s", strings.Join(failing, "; "))
}

// logMovers tells in the log, once, what movers were started and what they will be.
func (a *Agent) logMovers() {
	for _, m := range a.movers() {
		a.log.Info("mover", zap.String("name", m.Name), zap.String("device", m.Device), zap.Int("pid", m.Pid), zap.String("numa_node", m.Node))
	}
}
