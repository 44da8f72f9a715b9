package agent

import (
	"time"

	"github.com/kvagent/kvagent/transfer"
	"github.com/kvagent/kvagent/transfer/pace"
)

// Config configures an agent. The zero value of a field means its default where one is named.
type Config struct {
	Dir         string // socket directory
	SocketGroup int    // group id of the directory and its sockets; 0 or less: the owner alone
	AllowUIDs   []uint32
	AllowGIDs   []uint32
	Integrity   transfer.Integrity
	// VerifySample is the sampling interval of the end-to-end check: one block in VerifySample, of
	// each worker and direction, is checked; 0: none, 1: all.
	VerifySample uint32
	LeaseBytes   int64 // cap of one engine's leases; 0: half of the pool
	// Pace is the limit of copies that can wait, on each GPU and on the CPUs: pace.Off, pace.Auto,
	// or bytes per second.
	Pace int64
	// CPUPacer paces the copies on the CPUs, which others may use too; nil: one is made of Pace.
	CPUPacer *pace.Pacer
	Limits   Limits
	// PeerAddress is the host:port where agents of other nodes reach this one, which engines tell
	// each other; empty: none do.
	PeerAddress string
	Version     string // of this build, for status
	// Abandoned is why the pool's file was abandoned and the pool started empty; empty: it was not.
	Abandoned string
}

// Limits bounds an agent's waits, and what clients may make it keep. Protocol limits are in package
// ipc.
type Limits struct {
	Sessions int // session sockets at once; a further one gets ERROR limit
	Engines  int // instances at once
	Spaces   int // spaces at once; at the limit an unused one is closed
	Sockets  int // look-up sockets at once
	Outbox   int // messages waiting to be written to one session; a peer whose outbox is full counts as dead

	Parts       time.Duration // from REGISTER to the last of its parts
	Predecessor time.Duration // longest wait of a REGISTER for the teardown of the same rank's previous session
	Stuck       time.Duration // a worker's step older than this fails /livez
	Watch       time.Duration // interval at which what has reached its time ends
	// longest wait of a look-up for tiers below memory; a deadline in the own form may shorten it
	AskWait time.Duration

	Transfer transfer.Limits
}

// DefaultLimits are used if all limits are zero.
var DefaultLimits = Limits{
	Sessions: 1024, Engines: 256, Spaces: 1024, Sockets: 256, Outbox: 8192,
	Parts: 60 * time.Second, Predecessor: 3 * time.Second,
	Stuck: 90 * time.Second, Watch: time.Second, AskWait: 2 * time.Millisecond,
	Transfer: transfer.DefaultLimits,
}
