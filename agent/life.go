package agent

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// Start opens the agent's sockets, in this order; on an error it closes what it opened.
//  1. HTTP: the lock of admin.sock is the directory's, so that what follows is done by one agent at a time; and
//     whoever looks sees an agent that lives and is not ready yet.
//  2. What a dead agent left in the directory goes: its names are free.
//  3. The pool's pressure call, before anything can pin; the watchdog, before anything can be stuck; the sweep, before anything can be reset.
//  4. lookup.sock and the sockets of the configuration: they answer misses from now on.
//  5. The session socket, last: an engine that registers finds all the rest at work.
func (a *Agent) Start() (err error) {
	defer func() {
		if err != nil {
			a.Close()
		}
	}()
	if a.web, err = admin.Start(a.view, admin.Options{
		Dir: a.cfg.Dir, Admin: a.cfg.Admin, SocketGroup: a.cfg.SocketGroup, HTTP: a.cfg.HTTP, HTTPAny: a.cfg.HTTPAny,
		Limit: a.cfg.Limits.Handler, Log: a.log,
	}); err != nil {
		return err
	}
	if err = removeStale(a.cfg.Dir, a.cfg.SocketGroup); err != nil {
		return err
	}
	a.pool.SetPressure(a.ledger.Revoke)
	a.epochs.watch(a.pool, true)
	a.owned.Go(func() { a.watchdog.run(a.cfg.Limits.Watch, a.stop) })
	a.owned.Go(a.sweep)
	a.sockets.start()
	if err = a.sockets.openFixed(ipc.LookupSocket, pool.Fingerprint{}); err != nil {
		return err
	}
	for name, fp := range a.cfg.Lookups {
		if err = a.sockets.openFixed(name, fp); err != nil {
			return err
		}
	}
	if a.listener, err = ipc.ListenSession(ipc.SessionOptions{
		Path: filepath.Join(a.cfg.Dir, ipc.SessionSocket), SocketGroup: a.cfg.SocketGroup,
		UIDs: a.cfg.AllowUIDs, GIDs: a.cfg.AllowGIDs, OnRefused: a.sessions.refused,
	}); err != nil {
		return fmt.Errorf("session socket: %w", err)
	}
	a.owned.Go(func() { a.sessions.accept(a.listener, a.stop) })
	a.ready.Store(true)
	a.logMovers()
	a.log.Info("ready", zap.String("dir", a.cfg.Dir), zap.Int64("pool_bytes", a.pool.Stats().Capacity), zap.String("boot", hex.EncodeToString(a.boot[:])))
	return nil
}

// Drain takes no new jobs and waits until those that run have ended, or for ctx.
func (a *Agent) Drain(ctx context.Context) error {
	a.switches.drained.Store(true)
	a.log.Info("draining", zap.Int("jobs", a.inflight.count()))
	if err := a.inflight.wait(ctx); err != nil {
		return fmt.Errorf("%d jobs still run: %w", a.inflight.count(), err)
	}
	return nil
}

// errShutdown is the text of the last ERROR.
var errShutdown = errors.New("the agent is shutting down")

// Close ends the agent, in this order, and returns when nothing of it runs any more:
//  1. no new jobs, no look-up is promised anything;
//  2. the session socket stops listening: nobody new comes;
//  3. the sessions are told and torn down, each as teardown says: jobs, regions, leases, and its socket last;
//  4. the look-up sockets: until here every request got its answer, and no lease is left that one could ask for;
//  5. the pressure call: nothing is leased any more;
//  6. the watchdog, and the sweep of what was reset;
//  7. HTTP, and with it the directory's lock: the end could be watched until here, and a successor may come now.
func (a *Agent) Close() {
	a.closing.Do(func() {
		a.switches.drained.Store(true)
		a.ready.Store(false)
		if a.listener != nil {
			a.closed("session socket", a.listener.Close())
		}
		a.sessions.end(endShutdown, ipc.ErrCodeShutdown, errShutdown)
		a.closed("look-up sockets", a.sockets.close())
		a.pool.SetPressure(nil)
		a.epochs.watch(a.pool, false)
		close(a.stop)
		a.owned.Wait()
		if a.web != nil {
			a.web.Close()
		}
	})
}

// closed logs what did not close: nothing else can be done about it.
func (a *Agent) closed(what string, err error) {
	if err != nil {
		a.log.Error("not closed", zap.String("what", what), zap.Error(err))
	}
}

// Run is Start, and, once ctx is done, Drain for at most drain and Close. The end of now ends the drain at once. An
// error of the drain's context says that jobs were cut off.
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

// lockSuffix is what the name of a socket's lock has behind the socket's own.
const lockSuffix = ".lock"

// removeStale removes the sockets that a dead agent left in the directory: those with a lock that nobody holds. A lock
// without a socket is not looked at: others have files of such names too.
// The lock of admin.sock is held by this agent, so that no other one works here.
func removeStale(dir string, group int) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("socket-dir: %w", err)
	}
	for _, f := range files {
		name, isLock := strings.CutSuffix(f.Name(), lockSuffix)
		if !isLock || name == ipc.AdminSocket || !isSocket(filepath.Join(dir, name)) {
			continue
		}
		// Listening takes the lock and the dead socket's place, and closing removes both.
		l, err := ipc.ListenUnix(filepath.Join(dir, name), group)
		if errors.Is(err, ipc.ErrInUse) {
			return fmt.Errorf("socket-dir: %w", err)
		}
		if err != nil {
			continue // no socket of ours: whoever wants its name will hear of it
		}
		if err := l.Close(); err != nil {
			return fmt.Errorf("socket-dir: %w", err)
		}
	}
	return nil
}

func isSocket(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode()&fs.ModeSocket != 0
}
