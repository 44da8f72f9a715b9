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
//	jobTable.mu, outbox.mu, lease.Ledger.mu, inflight.mu, mappings.mu, a worker's, the pool's
//
// switches.mu is taken before sessions.mu and outbox.mu, and under nothing. A worker's completion and a look-up that is
// no reset take only the last line's; so does the pool's call for room, which comes without the pool's lock. No lock is
// held over a write to a peer.
package agent

import (
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/lease"
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

	metrics    *admin.Metrics
	ledger     *lease.Ledger
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
	mappings   *mappings    // regions that are open in the device
	pendingFDs atomic.Int64 // of registrations that are not complete
	drained    atomic.Bool  // no new jobs, no look-ups

	listener *ipc.SessionListener
	view     *admin.View
	web      *admin.Server
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
		cfg: cfg, pool: p, index: p, device: device, log: log, since: time.Now(), metrics: admin.NewMetrics(endReasons[:], panicPlaces[:]),
		peers: newPeerNumbers(), mappings: newMappings(), stop: make(chan struct{}),
	}
	a.tiers, _ = p.(pool.Tiers)
	a.ledger = lease.New(max(capacity-capacity/defaultLeaseShare, cfg.LeaseBytes), p.Unpin, a.tiers)
	if p, ok := p.(pool.Mapped); ok {
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
	a.view = admin.NewView(a.source(), a.metrics)
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
