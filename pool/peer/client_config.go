package peer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/peer/allow"
)

// ClientConfig configures a client.
type ClientConfig struct {
	Slots pool.Slots
	Arena []byte // the memory that Slots' offsets count in
	Auth  Auth
	// Timeout is how long a peer may be silent, or take to answer a connection, before it counts as
	// lost; 0 is DefaultTimeout.
	Timeout time.Duration
	Streams int // connections to one peer; 0 is 2
	// WindowBytes bounds what one fetch has asked for and not received; 0 is 16 MiB. So many bytes
	// of slots are reserved for it. A single block may be larger.
	WindowBytes int64
	BatchBytes  int64 // of one request to a peer; 0 is 1 MiB
	Fetches     int   // at once; 0 is 64. Another one is ErrBusy
	// Peers bounds the addresses that have connections, counters and a breaker; 0 is 64. The one
	// unused longest gives way, its counts go to "other".
	Peers int
	Idle  time.Duration // connections without a fetch are closed after this; 0 is 30 s
	// BreakFirst and BreakLast bound the pause after a peer was lost, which doubles each time; 0 is
	// 500 ms and 30 s.
	BreakFirst, BreakLast time.Duration
	// Reader reads blocks of agents that have one, too, not having them sent; nil: they are.
	Reader Reader
	Allow  allow.Hosts // the hosts that requests may name
	// Dial opens a connection to an allowed host; nil is TCP.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
	// Log reports lost peers and damaged blocks, as often as a peer likes. It may be nil.
	Log func(peer, what string, err error)
}

func (c *ClientConfig) complete() error {
	if !c.Auth.given() {
		return errNoAuth
	}
	setDefault(&c.Timeout, DefaultTimeout)
	setDefault(&c.Streams, 2)
	setDefault(&c.WindowBytes, 16<<20)
	setDefault(&c.BatchBytes, 1<<20)
	setDefault(&c.Fetches, 64)
	setDefault(&c.Peers, 64)
	setDefault(&c.Idle, 30*time.Second)
	setDefault(&c.BreakFirst, 500*time.Millisecond)
	setDefault(&c.BreakLast, 30*time.Second)
	if c.Log == nil {
		c.Log = func(string, string, error) {}
	}
	if c.Dial == nil {
		c.Dial = c.Allow.Dial
	}
	return nil
}

var errNoAuth = errors.New("peer: Auth must be given: --peer-key-file or --peer-tls-dir")

// Request names the blocks to fetch. The client owns everything in it until Fetch returns.
type Request struct {
	// Name is the transfer's, at most MaxName bytes. Empty: whatever the peer has stored now is
	// fetched, and nothing is waited for.
	Name   string
	Space  pool.Fingerprint
	ID     pool.SpaceID // of the space in the local pool
	Epoch  uint32       // of the space in the local pool; blocks are not stored after a reset of it
	Shards int          // of the space
	Groups []Group      // with ascending numbers and together at most MaxHashes blocks
	// Wait bounds how long the peer waits for the transfer to grow, 0 to MaxWait. Blocks
	// that it has announced by then are still fetched.
	Wait  time.Duration
	Early bool // the peer may not have heard of the transfer yet: it is waited for, too
}

// Group is a run of chained blocks of one KV cache group.
type Group struct {
	Group  uint8
	Parent []byte // hash of the block before the first; empty at the start of a prompt
	Hashes pool.Hashes
}

// Result is what became of a fetch. Blocks and Failed together are the blocks of the request.
type Result struct {
	End    End
	Tokens uint32 // of the transfer, if the peer stated them
	Blocks int    // stored by this fetch, with all their shards
	Bytes  int64  // of them
	Took   time.Duration
	Failed [Reasons]int // blocks that were not stored, by reason
}

// check checks what a client of an engine may have told.
func (r *Request) check() error {
	blocks := 0
	for i := range r.Groups {
		g := &r.Groups[i]
		if i > 0 && g.Group <= r.Groups[i-1].Group {
			return fmt.Errorf("peer: Groups[%d] is %d after %d, allowed: ascending", i, g.Group, r.Groups[i-1].Group)
		}
		blocks += g.Hashes.N
	}
	if blocks > MaxHashes {
		return fmt.Errorf("peer: %d blocks, allowed: 1 to %d", blocks, MaxHashes)
	}
	return nil
}
