package agent

import (
	"fmt"
	"runtime"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/registration"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// Pool is what the agent needs of a pool: one value that answers, is filled and is administered.
type Pool interface {
	pool.Index
	pool.Slots
	pool.Spaces
}

// Config of an agent. The zero value of a field means its default where one is named.
type Config struct {
	Dir string // socket directory
	// Admin is admin.sock, listened at already; its lock is the directory's. Nil: Start listens. It is the agent's
	// from New on if that succeeds.
	Admin       *ipc.UnixListener
	SocketGroup int // group id of the directory and its sockets; 0 or less: the owner alone
	AllowUIDs   []uint32
	AllowGIDs   []uint32
	Integrity   transfer.Integrity
	// VerifySample has one block in so many, of each worker and direction, checked end to end; 0: none, 1: all.
	VerifySample uint32
	LeaseBytes   int64 // cap of one engine's leases; 0: a quarter of the pool
	// Lookups are look-up sockets that are open from the start: name to fingerprint of their space.
	Lookups map[string]pool.Fingerprint
	HTTP    string // address for HTTP besides admin.sock, or empty
	HTTPAny bool   // HTTP may be an address that is not loopback
	Lanes   int    // copies that run at once; 0: one per processor, at least 2
	Limits  Limits
	Version string // of this build, for status
	// LeftBehind is what agents before this one left in the directory; nil: nothing.
	LeftBehind func() admin.LeftBehind
}

// Limits of an agent: times, and counts of what clients may make it keep. Protocol limits are in package ipc.
type Limits struct {
	Sessions int // session sockets at once; a further one is told ERROR limit
	Engines  int // instances at once
	Spaces   int // spaces at once; at the limit one that no engine uses is closed
	Sockets  int // look-up sockets at once
	Outbox   int // messages waiting to be written to one session; full, the peer counts as dead

	Parts       time.Duration // from REGISTER to the last of its parts
	Predecessor time.Duration // longest wait of a REGISTER for the same rank's last session to be torn down
	Stuck       time.Duration // a worker's step older than this fails /livez
	Watch       time.Duration // how often the watchdog looks
	Handler     time.Duration // one HTTP request
	AskWait     time.Duration // longest wait of a look-up for tiers below memory; the own form may ask for less by its deadline

	Transfer transfer.Limits
}

// DefaultLimits are used for every limit that is zero.
var DefaultLimits = Limits{
	Sessions: 1024, Engines: 256, Spaces: 1024, Sockets: 256, Outbox: 8192,
	Parts: 60 * time.Second, Predecessor: 3 * time.Second,
	Stuck: 90 * time.Second, Watch: time.Second, Handler: 10 * time.Second, AskWait: 2 * time.Millisecond,
	Transfer: transfer.DefaultLimits,
}

// maxLanes is the most copies that may run at once.
const maxLanes = 256

// defaultLeaseShare is the part of the pool one engine may lease unless told otherwise.
const defaultLeaseShare = 4

func (c *Config) validate() error {
	switch {
	case c.Dir == "":
		return fmt.Errorf("socket-dir: empty, allowed: a directory")
	case c.LeaseBytes < 0:
		return fmt.Errorf("lease-bytes: %d, allowed: 0 (a quarter of the pool) or more", c.LeaseBytes)
	case c.Integrity != transfer.Full && c.Integrity != transfer.Header:
		return fmt.Errorf("integrity: %d, allowed: full, header", c.Integrity)
	case c.VerifySample > transfer.MaxSampleEvery:
		return fmt.Errorf("verify-sample: %d, allowed: 0 (none) to %d", c.VerifySample, transfer.MaxSampleEvery)
	}
	for name := range c.Lookups {
		if err := registration.CheckLookupName(c.Dir, name); err != nil {
			return fmt.Errorf("lookup: %w", err)
		}
	}
	if c.Lanes == 0 {
		c.Lanes = max(runtime.NumCPU(), 2)
	}
	if c.Lanes < 1 || c.Lanes > maxLanes {
		return fmt.Errorf("copy-lanes: %d, allowed: 1 to %d, or 0 for one per processor", c.Lanes, maxLanes)
	}
	c.Limits.fill()
	return c.Limits.validate()
}

// fill puts the default where a limit is zero.
func (l *Limits) fill() {
	d := DefaultLimits
	for _, p := range []struct {
		v *int
		d int
	}{{&l.Sessions, d.Sessions}, {&l.Engines, d.Engines}, {&l.Spaces, d.Spaces}, {&l.Sockets, d.Sockets}, {&l.Outbox, d.Outbox}} {
		if *p.v == 0 {
			*p.v = p.d
		}
	}
	for _, p := range []struct {
		v *time.Duration
		d time.Duration
	}{
		{&l.Parts, d.Parts}, {&l.Predecessor, d.Predecessor}, {&l.Stuck, d.Stuck}, {&l.Watch, d.Watch}, {&l.Handler, d.Handler}, {&l.AskWait, d.AskWait},
	} {
		if *p.v == 0 {
			*p.v = p.d
		}
	}
	if l.Transfer == (transfer.Limits{}) {
		l.Transfer = d.Transfer
	}
}

func (l *Limits) validate() error {
	switch {
	case l.Sessions < 1 || l.Engines < 1 || l.Sockets < 1:
		return fmt.Errorf("limits: sessions %d, engines %d, sockets %d, allowed: 1 or more", l.Sessions, l.Engines, l.Sockets)
	case l.Spaces < 1 || l.Spaces > pool.MaxSpaces:
		return fmt.Errorf("limits: spaces %d, allowed: 1 to %d", l.Spaces, pool.MaxSpaces)
	case l.Outbox < 16:
		return fmt.Errorf("limits: outbox %d, allowed: 16 or more", l.Outbox)
	case l.Stuck < l.Watch:
		return fmt.Errorf("limits: stuck %v, allowed: %v (watch) or more", l.Stuck, l.Watch)
	}
	return nil
}
