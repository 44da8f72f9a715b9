// Package agent owns lifetimes: engines and their workers, leases, regions, look-up sockets. It
// connects the sockets, the pool, the look-up rules and the transfers, and releases everything an
// engine holds when the engine ends.
//
// Locks are taken in this order. The locks of the last line are leaves.
//
//	session.mu          a message is served, or the session torn down
//	lookupSockets.mu    a socket opens or closes; its goroutine takes the locks below
//	space.resetting     a weights epoch is advanced, which calls the pool
//	heldLoads.mu        a held load is handed to its worker, or reported
//	registry.mu         a seat changes; the pool is called; space.resetting is only tried
//	guests' locks       under which the pool's are taken
//	jobTable.mu, sessions.mu, lease.Ledger.mu, memory.mu,
//	a worker's, the pool's
//
// switches.mu is taken before sessions.mu, and while no other lock is held. A
// worker's completion, a look-up other than a reset, and the pool's pressure call (made without the
// pool's lock) take only locks of the last line. No lock is held during a write to a peer.
package agent

import (
	"cmp"
	"crypto/rand"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/kvagent/kvagent/agent/lease"
	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/connlimit"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
	"github.com/kvagent/kvagent/transfer/pace"
)

// Agent is the agent of one node. New makes it, Start opens its sockets, Close ends it. The pool
// and the device belong to the caller, which closes them afterwards.
type Agent struct {
	cfg    Config
	pool   pool.Memory
	tiers  pool.Tiers // the same pool if it has tiers below its memory, else nil
	device cudaipc.Device
	log    *zap.Logger
	rare   *zap.Logger // see Rarely
	boot   [16]byte
	since  time.Time

	metrics  *report.Metrics
	ledger   *lease.Ledger
	registry *registry
	sockets  *lookupSockets
	sessions *sessions
	switches *switches
	workers  *workers
	memory   *memory

	guests Guests

	listener *ipc.SessionListener
	owned    sync.WaitGroup // goroutines: accept, upkeep
	stop     chan struct{}  // closed to end upkeep
	ready    atomic.Bool
	closing  sync.Once
}

// New makes an agent of a pool and a device, which remain the caller's.
func New(cfg Config, p pool.Memory, device cudaipc.Device, log *zap.Logger) (*Agent, error) {
	capacity := p.Stats().Capacity
	cfg.LeaseBytes = cmp.Or(cfg.LeaseBytes, max(capacity/2, 1))
	cfg.Limits = cmp.Or(cfg.Limits, DefaultLimits)
	if cfg.CPUPacer == nil {
		cfg.CPUPacer = pace.New(cfg.Pace, nil)
	}
	a := &Agent{
		cfg: cfg, pool: p, device: device, log: log, rare: Rarely(log), since: time.Now(),
		metrics:  report.NewMetrics(endReasons[:]),
		switches: &switches{}, stop: make(chan struct{}),
	}
	a.switches.loads.Store(true)
	a.switches.saves.Store(true)
	a.tiers, _ = p.(pool.Tiers)
	a.ledger = lease.New(max(capacity/4*3, cfg.LeaseBytes), p.Unpin, a.tiers) // saves find room in the rest
	if _, err := rand.Read(a.boot[:]); err != nil {
		return nil, fmt.Errorf("boot epoch: %w", err)
	}
	files, err := openFiles()
	if err != nil {
		return nil, fmt.Errorf("limit of open files: %w", err)
	}
	limits := shareOf(files, a.cfg.Limits.Sessions)
	if limits.sessions < a.cfg.Limits.Sessions {
		log.Warn("session limit lowered: the limit of open files is too low", zap.Uint64("files", files),
			zap.Int("sessions", limits.sessions), zap.Int("allowed", a.cfg.Limits.Sessions))
	}
	a.assemble(limits)
	return a, nil
}

// Rarely returns a log that writes one of like lines in ten seconds and drops the others: for what
// a broken device or a client can repeat at any rate.
func Rarely(log *zap.Logger) *zap.Logger {
	return log.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(c, 10*time.Second, 1, 0)
	}))
}

// assemble makes the agent's parts and gives each its dependencies.
func (a *Agent) assemble(limits share) {
	a.registry = newRegistry(a.pool, &a.cfg.Limits, a.cfg.LeaseBytes)
	a.workers = newWorkers(a)
	a.sockets = newLookupSockets(limits.peers, &answers{
		Agent: a, index: a.pool,
		readiness: readiness{
			slots: a.pool, arena: a.workers.arena, sums: a.cfg.Integrity == transfer.Full, maxBytes: maxReadyBytes,
		},
	})
	a.memory = &memory{
		device: a.device, maxPending: limits.pending, log: a.log,
		maxRegions: mostRegions(), maxBytes: maxMappedBytes,
	}
	a.sessions = &sessions{
		Agent: a, places: connlimit.ForUsers(limits.sessions), last: firstSession(a.boot),
		open: make(map[uint64]*session),
	}
}

// Set switches loads and saves on or off; nil leaves one as it is. Every session is notified.
func (a *Agent) Set(loads, saves *bool) report.SwitchState { return a.sessions.set(loads, saves) }

// Sessions returns how many sessions are open, and the number of the newest one.
func (a *Agent) Sessions() (open int, newest uint64) {
	a.sessions.mu.Lock()
	defer a.sessions.mu.Unlock()
	return len(a.sessions.open), a.sessions.last
}
