package agent

import (
	"errors"
	"fmt"
	"strings"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
)

// Ready returns the reason why the agent does not serve: its sockets are not open or were removed,
// it drains, its pool has no capacity, too much of its memory is bad, or a mover that worked cannot
// be restarted.
func (a *Agent) Ready() error {
	switch {
	case a.switches.draining():
		return errors.New("draining")
	case !a.ready.Load():
		return errors.New("the sockets are not open yet")
	case a.pool.Stats().Capacity <= 0:
		return errors.New("the pool has no capacity")
	case !a.listener.Reachable():
		return errors.New("session.sock was removed or replaced: no engine can connect any more; restart the agent")
	}
	if err := a.memoryProblem(); err != nil {
		return err
	}
	return a.moverProblem()
}

// memoryProblem returns an error if too many pages of the pool cannot be read. The rest of the pool
// stays in use.
func (a *Agent) memoryProblem() error {
	s := a.pool.Stats()
	if s.Bad.Healthy() {
		return nil
	}
	return fmt.Errorf("%d pages of the pool cannot be read (limit %d), and %d bytes are not used for it (limit %d): "+
		"check the node's memory", s.Bad.Pages, s.Bad.MaxPages, s.Bad.Bytes, s.Bad.MaxBytes)
}

// movers returns the device's movers; none if the device is in this process.
func (a *Agent) movers() []cudaipc.MoverState {
	if d, ok := a.device.(interface{ Movers() []cudaipc.MoverState }); ok {
		return d.Movers()
	}
	return []cudaipc.MoverState{}
}

// MoverPIDs returns the process IDs of the running movers.
func (a *Agent) MoverPIDs() (pids []int) {
	for _, m := range a.movers() {
		if m.PID != 0 {
			pids = append(pids, m.PID)
		}
	}
	return pids
}

// moverProblem returns an error that names the movers that keep failing.
func (a *Agent) moverProblem() error {
	var failing []string
	for _, m := range a.movers() {
		if m.Failing {
			failing = append(failing, fmt.Sprintf("%s: %s", m.Name, m.LastLoss))
		}
	}
	if len(failing) == 0 {
		return nil
	}
	return fmt.Errorf("movers fail again and again: %s", strings.Join(failing, "; "))
}

// logMovers logs the movers once, at the start.
func (a *Agent) logMovers() {
	for _, m := range a.movers() {
		a.log.Info("mover", zap.String("name", m.Name), zap.String("device", m.Device), zap.Int("pid", m.PID),
			zap.String("numa_node", m.Node))
	}
}
