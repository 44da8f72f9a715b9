package agent

import (
	"fmt"
	"strings"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
)

// lostPeer ends the session of a worker whose memory was open in a process that is no more. Its copies have ended; the
// engine hears why, and registers again.
func (a *Agent) lostPeer(id cudaipc.PeerID, why error) {
	if s := a.peers.owner(id); s != nil {
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
