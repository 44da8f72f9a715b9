package main

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
)

// moverVictim is how long a copy is waited for before a mover is killed without one.
const moverVictim = 2 * time.Second

// killMover kills a mover of an agent, at a moment when it copies if there is one soon. Engines and
// agent go on meanwhile.
func (r *replay) killMover(ctx context.Context, a *replayAgent) {
	r.watch(fmt.Sprintf("a mover of node %d to be killed", a.node), func() {
		ctx, stop := context.WithTimeout(ctx, moverVictim)
		defer stop()
		var idle *admin.MoverStatus
		for ctx.Err() == nil {
			st, err := a.status(ctx)
			for i := range st.Movers {
				if m := &st.Movers[i]; err == nil && m.Running && m.Copies > 0 {
					r.strikeMover(m)
					return
				} else if err == nil && m.Running {
					idle = m
				}
			}
		}
		if idle != nil {
			r.strikeMover(idle)
		}
	})
}

func (r *replay) strikeMover(m *admin.MoverStatus) {
	if syscall.Kill(m.PID, syscall.SIGKILL) != nil {
		return // the agent was killed meanwhile, and its mover is gone with it
	}
	r.tally.Lock()
	defer r.tally.Unlock()
	r.tally.moverKills++
	if m.Copies > 0 {
		r.tally.moverInFlight++
	}
}
