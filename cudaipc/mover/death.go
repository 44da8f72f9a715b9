package mover

import (
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// lose kills the process; only the first reason counts. run does the rest once the process is
// reaped.
func (l *life) lose(reason cudaipc.LossReason, cause error) {
	l.once.Do(func() {
		l.reason, l.cause = reason, cause
		close(l.ending)
		if p := l.cmd.Process; p != nil {
			_ = l.m.opts.Kill(p) // fails only if the process has ended
		}
	})
}

// disconnect handles a closed socket. If the process has exited it is about to be reaped, and its
// exit status says more; otherwise it is killed.
func (l *life) disconnect(cause error) {
	if !disconnected(cause) || !closesWithin(l.ending, hangUpWait) {
		l.lose(cudaipc.LostCrash, cause)
	}
}

// hangUpWait is how long a process may take to be reaped after it closed its socket.
const hangUpWait = 100 * time.Millisecond

// err returns why the life ended. It may be called once ending is closed.
func (l *life) err() error {
	return &cudaipc.LostError{Mover: l.m.opts.Name, Reason: l.reason, Cause: l.cause}
}

// end ends a life once its process is reaped. Messages that were received before count;
// everything else has failed.
func (l *life) end() {
	_ = l.conn.conn.SetReadDeadline(time.Now().Add(endWait)) // its other end is closed: read has no more to wait for
	l.joined.Wait()
	l.conn.close()
	lost := l.m.remove(l)
	l.calls.fail(l.err())
	if l.m.watch != nil && !l.quitting.Load() {
		for _, id := range lost {
			l.m.watch(id, l.err())
		}
	}
	close(l.ended)
}

// remove deletes a life, ends its copies and returns the peers that are lost with it.
func (m *Mover) remove(l *life) (lost []cudaipc.PeerID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l.over = true
	if m.mu.life == l {
		m.mu.life = nil
	}
	if !l.quitting.Load() {
		m.mu.history.loss(l, &m.opts.Limits)
	}
	for id, p := range m.mu.peers {
		if p.life == l && !p.opening {
			p.lost = l.err()
			if !p.closing {
				lost = append(lost, id)
			}
		}
	}
	for _, c := range m.mu.tickets.Open {
		if c.of.life == l && !c.ended {
			c.endLocked(allBad(&cudaipc.Copy{Sum: c.sum, Blocks: make([]cudaipc.Block, c.blocks)}, l.err()))
		}
	}
	return lost
}
