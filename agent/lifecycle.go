package agent

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// Start opens the agent's sockets in this order, and closes them again on an error.
//  1. The guests start: the lock of admin.sock guards the directory, so one agent at a time does
//     the rest, and an operator sees an agent that is alive and not ready yet.
//  2. The pool's pressure call is set before anything can pin, and the upkeep starts before a space
//     can be reset.
//  3. lookup.sock opens; it answers misses from now on.
//  4. The session socket opens last: an engine that registers finds everything else running.
func (a *Agent) Start() (err error) {
	defer func() {
		if err != nil {
			a.Close()
		}
	}()
	if err = a.guests.Start(); err != nil {
		return err
	}
	a.pool.SetPressure(a.ledger.Revoke)
	if a.tiers != nil {
		a.tiers.OnAdopted(a.adopted)
	}
	a.owned.Go(a.upkeep)
	if err = a.sockets.openOwn(); err != nil {
		return err
	}
	if a.listener, err = ipc.ListenSession(ipc.SessionOptions{
		Path: filepath.Join(a.cfg.Dir, socketdir.Session), SocketGroup: a.cfg.SocketGroup,
		UIDs: a.cfg.AllowUIDs, GIDs: a.cfg.AllowGIDs, OnRefused: a.sessions.refused,
	}); err != nil {
		return fmt.Errorf("session socket: %w", err)
	}
	a.owned.Go(func() { a.sessions.accept(a.listener) })
	a.ready.Store(true)
	a.log.Info("ready", zap.String("dir", a.cfg.Dir), zap.Int64("pool_bytes", a.pool.Stats().Capacity),
		zap.String("boot", hex.EncodeToString(a.boot[:])))
	return nil
}

// Drain refuses new jobs and waits until the running ones have ended, or until ctx is done. No copy
// waits for its pace any more.
func (a *Agent) Drain(ctx context.Context) error {
	a.switches.drained.Store(true)
	a.workers.pacers.End()
	a.log.Info("draining", zap.Int("jobs", a.sessions.jobs()))
	tick := time.NewTicker(drainPoll)
	defer tick.Stop()
	for a.sessions.jobs() > 0 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%d jobs still run: %w", a.sessions.jobs(), ctx.Err())
		}
	}
	return nil
}

// drainPoll is how often a drain looks whether jobs still run.
const drainPoll = 5 * time.Millisecond

// errShutdown is the text of the last ERROR.
var errShutdown = errors.New("the agent is shutting down")

// Close ends the agent in this order, and returns when none of its goroutines runs:
//  1. new jobs are refused, and look-ups are promised nothing;
//  2. the session socket stops listening;
//  3. the sessions are notified and torn down, see teardown: jobs, regions, leases, the socket
//     last;
//  4. the look-up sockets close: every request got its answer until here, and no lease is left;
//  5. the pressure call is removed: nothing is leased any more;
//  6. the upkeep ends;
//  7. the guests end, and release the directory's lock: a successor may start now.
func (a *Agent) Close() {
	a.closing.Do(func() {
		a.switches.drained.Store(true)
		a.workers.pacers.End()
		a.ready.Store(false)
		if a.listener != nil {
			if err := a.listener.Close(); err != nil {
				a.log.Error("session socket not closed", zap.Error(err))
			}
		}
		a.sessions.end(endShutdown, ipc.ErrCodeShutdown, errShutdown)
		a.sockets.close()
		a.pool.SetPressure(nil)
		if a.tiers != nil {
			a.tiers.OnAdopted(nil)
		}
		close(a.stop)
		a.owned.Wait()
		a.guests.Close()
	})
}

// Run calls Start, waits for ctx, then calls Drain for at most drain, and Close. The end of now
// ends the drain at once. It returns the error of a drain that cut jobs off.
func (a *Agent) Run(ctx, now context.Context, drain time.Duration) error {
	if err := a.Start(); err != nil {
		return err
	}
	<-ctx.Done()
	bounded, cancel := context.WithTimeout(now, drain)
	defer cancel()
	err := a.Drain(bounded)
	a.Close()
	return err
}

// upkeep reclaims the memory of reset and closed spaces, and lets the guests end what has reached
// its time, until the agent ends. It finishes a round of the pool that it has begun, whose time is
// proportional to the pool's size; a reset does not wait for it.
func (a *Agent) upkeep() {
	tick := time.NewTicker(a.cfg.Limits.Watch)
	defer tick.Stop()
	for {
		select {
		case <-a.registry.swept:
			a.pool.Sweep()
		case <-tick.C:
			a.guests.Expire()
		case <-a.stop:
			return
		}
	}
}

// Ready returns the reason why the agent does not serve: its sockets are not open or were removed,
// it drains, too much of its memory is bad, or a mover that worked cannot
// be restarted.
func (a *Agent) Ready() error {
	switch {
	case a.switches.draining():
		return errors.New("draining")
	case !a.ready.Load():
		return errors.New("the sockets are not open yet")
	case !a.listener.Reachable():
		return errors.New("session.sock was removed or replaced: no engine can connect any more; restart the agent")
	}
	if bad := a.pool.Stats().Bad; !bad.Healthy() { // the rest of the pool stays in use
		return fmt.Errorf("%d pages of the pool cannot be read (limit %d), and %d bytes are not used for it "+
			"(limit %d): check the node's memory", bad.Pages, bad.MaxPages, bad.Bytes, bad.MaxBytes)
	}
	var failing []string
	for _, m := range a.movers() {
		if m.Failing {
			failing = append(failing, fmt.Sprintf("%s: %s", m.Name, m.LastLoss))
		}
	}
	if len(failing) > 0 {
		return fmt.Errorf("movers fail again and again: %s", strings.Join(failing, "; "))
	}
	return nil
}

// movers returns the device's movers; none if the device is in this process.
func (a *Agent) movers() []cudaipc.MoverState {
	if d, ok := a.device.(interface{ Movers() []cudaipc.MoverState }); ok {
		return d.Movers()
	}
	return []cudaipc.MoverState{}
}

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
