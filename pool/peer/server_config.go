package peer

import (
	"context"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// State is what a server's side has heard of a transfer.
type State uint8

// The states.
const (
	Unknown  State = iota // never opened, or it has ended
	Open                  // more blocks will be stored for it
	Complete              // nothing more will be stored for it
	Unheard               // not known yet: what may have opened it has not been served
)

// Transfer is a transfer as it is now.
type Transfer struct {
	State  State
	Tokens uint32 // of the prompt if open, stored if complete; 0: not stated
}

// Source returns the state of a named transfer in a space, and a channel that is closed at its next
// change or at the next commit in that space, whichever is first; while it is Unheard, when it may
// be known. The state and the channel belong together: what happens after the state was read closes
// the channel. It may be called by many goroutines, and must not block.
type Source func(space pool.SpaceID, name string) (Transfer, <-chan struct{})

// Config configures a server.
type Config struct {
	// Index is of the memory behind Slots: a block that only a tier has could be announced, and not
	// sent.
	Index pool.Index
	Slots pool.Slots
	Arena []byte // the memory that Slots' offsets count in
	// Resolve returns the space that is open under a fingerprint. Called for each fetch and batch.
	Resolve   func(f pool.Fingerprint) (s pool.SpaceID, epoch uint32, ok bool)
	Transfers Source
	// Raise brings what only lower tiers have of a chain into memory, as far as there is room. It
	// returns when nothing more of it comes, or ctx ends. nil: there are no tiers.
	Raise func(ctx context.Context, s pool.SpaceID, group uint8, h pool.Hashes)
	// Delivered is called when a peer has a transfer, or no longer wants it. It must not block, and
	// may be nil.
	Delivered func(space pool.SpaceID, name string)
	Auth      Auth
	// Timeout is how long a peer may be silent, or not take a MiB that is sent to it, before its
	// connection ends; 0 is DefaultTimeout.
	Timeout time.Duration
	Limits  Limits
	// Reader lets other agents' readers read the arena; nil: none does.
	Reader Reader
	// NoSums says that slots have no checksums (integrity header): the server then sums what it
	// sends. Otherwise it sends the sums of the slots.
	NoSums bool
	// Log reports refused and lost peers, as often as a peer likes. It may be nil.
	Log func(peer, what string, err error)
}

// Limits of a server. Zero fields take the default in parentheses.
type Limits struct {
	// Connections is of authenticated connections at once (256), and Pending of unauthenticated
	// ones (32). Beyond it the host with most gives way, as connlimit says; a quarter of the latter
	// is kept for hosts that have authenticated before.
	Connections, Pending int
	Subscriptions        int // of one connection at once (64); another one ends at once, as refused
	// PeerBytes is the memory that the subscriptions of one host may hold, whatever it has
	// connections (64 MiB), and Bytes that of all hosts together (256 MiB). One that finds no room
	// is not read into memory, and ends as above.
	PeerBytes, Bytes int64
	// PinnedBytes bounds what one connection has pinned for one-sided reads (64 MiB); more blocks
	// are sent in frames. A single block may be larger. All connections together may pin a quarter
	// of the arena.
	PinnedBytes int64
}

func (c *Config) complete() error {
	if !c.Auth.given() {
		return errNoAuth
	}
	setDefault(&c.Timeout, DefaultTimeout)
	setDefault(&c.Limits.Connections, 256)
	setDefault(&c.Limits.Pending, 32)
	setDefault(&c.Limits.Subscriptions, 64)
	setDefault(&c.Limits.PeerBytes, 64<<20)
	setDefault(&c.Limits.Bytes, max(256<<20, c.Limits.PeerBytes))
	setDefault(&c.Limits.PinnedBytes, 64<<20)
	if c.Log == nil {
		c.Log = func(string, string, error) {}
	}
	if c.Delivered == nil {
		c.Delivered = func(pool.SpaceID, string) {}
	}
	return nil
}

func setDefault[T int | int64 | time.Duration](v *T, to T) {
	if *v == 0 {
		*v = to
	}
}
