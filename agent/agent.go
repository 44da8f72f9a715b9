// Package agent owns lifetimes: engines and their workers, leases, regions, look-up sockets. It joins the
// sockets, the pool, the look-up rules and the transfers, and takes all of an engine apart when the engine ends.
//
// Locks are taken in this order, and none of the last line's under another of it but an outbox's under a job table's:
//
//	session.mu          a message is served, or the session torn down: it waits for the worker's threads under it
//	lookupSockets.mu    a socket opens or closes: it waits for the socket's goroutine, which takes those below
//	space.resetting     a weights epoch turns; the pool is asked under it
//	heldLoads.mu        a held load is handed to its worker, or reported
//	registry.mu         seats come and go; the pool is asked for an epoch, or to open or close a space, under it; space.resetting is tried
//	jobTable.mu, outbox.mu, ledger.mu, inflight.mu, mappings.mu, a worker's, the pool's
//
// switches.mu is taken before sessions.mu and outbox.mu, and under nothing. A worker's completion and a look-up that is
// no reset take only the last line's; so does the pool's call for room, which comes without the pool's lock. No lock is
// held over a write to a peer.
package agent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// Agent is the agent of one node. New makes it, Start opens its sockets, Close ends it; pool and device are the
// caller's, who closes them afterwards.
type Agent struct {
	cfg    Config
	pool   Pool
	index  pool.Index // the same pool, as look-ups see it
	tiers  pool.Tiers // the same pool, if it has tiers below its memory; nil: none
	device cudaipc.Device
	arena  []byte // the pool's, as this process sees it; nil: the pool does not say
	log    *zap.Logger
	boot   [16]byte
	since  time.Time

	metrics    *metrics
	ledger     *ledger
	registry   *registry
	sockets    *lookupSockets
	sessions   sessions
	switches   switches
	peers      *peerNumbers
	share      share
	lanes      map[cudaipc.UUID]*transfer.Lanes // by GPU, zero for CPUs' copies; under registry.mu
	inflight   inflight
	mismatches mismatches
	watchdog   *watchdog
	fault      faultCounter
	mappings   *mappings    // regions that are open in the device
	pendingFDs atomic.Int64 // of registrations that are not complete
	drained    atomic.Bool  // no new jobs, no look-ups

	listener *ipc.SessionListener
	web      *web
	owned    sync.WaitGroup // accept, watchdog and sweep
	stop     chan struct{}  // closed to end the watchdog and sweep
	ready    atomic.Bool
	closing  sync.Once
}

// New makes an agent of a pool and a device, which stay the caller's.
func New(cfg Config, p Pool, device cudaipc.Device, log *zap.Logger) (*Agent, error) {
	capacity := p.Stats().Capacity
	if cfg.LeaseBytes == 0 {
		cfg.LeaseBytes = max(capacity/defaultLeaseShare, 1)
	}
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	a := &Agent{
		cfg: cfg, pool: p, index: p, device: device, log: log, since: time.Now(), metrics: newMetrics(),
		ledger: newLedger(max(capacity-capacity/defaultLeaseShare, cfg.LeaseBytes), p.Unpin),
		peers:  newPeerNumbers(), mappings: newMappings(), stop: make(chan struct{}),
	}
	if tiers, ok := p.(pool.Tiers); ok {
		a.tiers, a.ledger.tiers = tiers, tiers
	}
	if p, ok := p.(interface{ Arena() ([]byte, int) }); ok {
		a.arena, _ = p.Arena()
	}
	if cfg.VerifySample > 0 && len(a.arena) == 0 {
		return nil, errors.New("verify-sample: allowed with a pool in this process's memory, else 0")
	}
	a.lanes = map[cudaipc.UUID]*transfer.Lanes{}
	if _, err := rand.Read(a.boot[:]); err != nil {
		return nil, fmt.Errorf("boot epoch: %w", err)
	}
	files, err := openFiles()
	if err != nil {
		return nil, fmt.Errorf("limit of open files: %w", err)
	}
	if a.share = shareDescriptors(files, a.cfg.Limits.Sessions); a.share.sessions < a.cfg.Limits.Sessions {
		log.Warn("fewer sessions than are allowed: the limit of open files is low", zap.Uint64("files", files), zap.Int("sessions", a.share.sessions), zap.Int("allowed", a.cfg.Limits.Sessions))
	}
	a.sessions.last = firstSession(a.boot)
	a.sessions.open = make(map[uint64]*session)
	a.switches.loads.Store(true)
	a.switches.saves.Store(true)
	a.registry = newRegistry(p, &a.cfg.Limits, a.cfg.LeaseBytes)
	a.sockets = newLookupSockets(a)
	a.watchdog = newWatchdog(a)
	a.fault.init(&a.cfg.Fault)
	a.registerGauges()
	if w, ok := device.(cudaipc.Watcher); ok {
		w.Watch(a.lostPeer)
	}
	return a, nil
}

// Boot is the agent's boot epoch.
func (a *Agent) Boot() [16]byte { return a.boot }

// SpaceID is the pool's number of a space, once all its shards are known.
func (a *Agent) SpaceID(fp pool.Fingerprint) (pool.SpaceID, bool) {
	if sp := a.registry.view.Load().spaces[fp]; sp != nil {
		if rules := sp.open.Load(); rules != nil {
			return rules.ID, true
		}
	}
	return 0, false
}

func (a *Agent) draining() bool { return a.drained.Load() }

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
	if a.web, err = startWeb(a); err != nil {
		return err
	}
	if err = removeStale(a.cfg.Dir, a.cfg.SocketGroup); err != nil {
		return err
	}
	a.pool.SetPressure(a.ledger.revoke)
	a.watchAdopted(true)
	a.owned.Go(a.watchdog.run)
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
		UIDs: a.cfg.AllowUIDs, GIDs: a.cfg.AllowGIDs, OnRefused: a.refused,
	}); err != nil {
		return fmt.Errorf("session socket: %w", err)
	}
	a.owned.Go(a.accept)
	a.ready.Store(true)
	a.logMovers()
	a.log.Info("ready", zap.String("dir", a.cfg.Dir), zap.Int64("pool_bytes", a.pool.Stats().Capacity), zap.String("boot", hex.EncodeToString(a.boot[:])))
	return nil
}

// Drain takes no new jobs and waits until those that run have ended, or for ctx.
func (a *Agent) Drain(ctx context.Context) error {
	a.drained.Store(true)
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
		a.drained.Store(true)
		a.ready.Store(false)
		if a.listener != nil {
			a.closed("session socket", a.listener.Close())
		}
		a.sessions.end(endShutdown, ipc.ErrCodeShutdown, errShutdown)
		a.closed("look-up sockets", a.sockets.close())
		a.pool.SetPressure(nil)
		a.watchAdopted(false)
		close(a.stop)
		a.owned.Wait()
		if a.web != nil {
			a.web.close()
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
