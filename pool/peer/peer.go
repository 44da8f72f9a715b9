// Package peer brings blocks from the pool of another node's agent over TCP. A Server announces and
// sends what its pool has; a Client fetches it straight into the slots of its own pool, verifies it
// there, and commits it.
//
//	client                                     server
//	  │ SUBSCRIBE name, space, hashes            │
//	  │─────────────────────────────────────────▶│ watches the transfer and the space
//	  │ HAVE these blocks         (as committed) │
//	  │◀─────────────────────────────────────────│
//	  │ reserve slots; GET batch (any stream)    │
//	  │─────────────────────────────────────────▶│ pin, send from the arena, unpin
//	  │ BLOCKS statuses, sums, bytes             │
//	  │◀═════════════════════════════════════════│
//	  │ sum the slot, compare, commit            │
//	  │ END nothing more will come               │
//	  │◀─────────────────────────────────────────│
//
// The bytes and their limits are in docs/PROTOCOL.md, "Agent to agent".
package peer

import (
	"errors"
	"time"
)

// Limits of one message. A peer that exceeds one loses its connection.
const (
	MaxName       = 256     // bytes of a transfer's name
	MaxHashes     = 1 << 16 // blocks of one fetch
	MaxBatch      = 64      // blocks of one GET
	MaxBatchBytes = 8 << 20 // bytes of one GET, unless it asks for a single block
	MaxBlockBytes = 1 << 30 // bytes of one shard of a block
)

// Ranges and defaults of times.
const (
	DefaultTimeout = 2 * time.Second // silence after which a peer counts as dead
	MinTimeout     = 50 * time.Millisecond
	MaxTimeout     = time.Minute
	MaxWait        = 10 * time.Minute // of Request.Wait
	handshakeTime  = 5 * time.Second  // an unauthenticated connection lives at most this long
)

// Errors to branch on. Fetch wraps them with the reason.
var (
	ErrClosed    = errors.New("peer: closed")
	ErrBusy      = errors.New("peer: too many fetches or peers")
	ErrSuspended = errors.New("peer: suspended after failures")
	ErrLost      = errors.New("peer: lost") // it could not be reached, or it died, froze, or broke the protocol
	ErrAuth      = errors.New("peer: not authenticated")
)

// End is why a fetch ended.
type End uint8

// The ends. Those from Complete to Refused are reported by the peer.
const (
	EndComplete  End = 1 // the transfer is complete, or every block asked for was announced
	EndUnknown   End = 2 // the peer has no such transfer; what it had stored was announced
	EndExpired   End = 3 // the transfer ended at its TTL
	EndWaited    End = 4 // the wait was over before the transfer was complete
	EndNoSpace   End = 5 // the peer has no such space
	EndRefused   End = 6 // the peer has too many fetches
	EndCancelled End = 7 // the caller's context ended
	EndLost      End = 8 // the peer could not be reached, or it died, froze, or broke the protocol
	ends             = 9
)

var endNames = [ends]string{
	"", "complete", "unknown", "expired", "waited", "no_space", "refused", "cancelled", "lost",
}

func (e End) String() string { return endNames[e] }

// Reason is why a block of a fetch was not stored.
type Reason uint8

// The reasons.
const (
	Had       Reason = iota // it is stored here already, or still being stored by an engine's save
	NotStored               // the peer never announced it
	Missing                 // the peer had announced it and had evicted it when it was asked for
	Busy                    // no slot could be reserved here, for 1.27 s
	Stale                   // the space was reset here meanwhile
	Corrupt                 // the bytes did not verify
	BadPage                 // a page of the slot cannot be written
	Invalid                 // the two pools disagree on the shape of the block
	Abandoned               // it was asked for, and the fetch was cancelled or the peer lost before it arrived
	Reasons                 // their number
)

var reasonNames = [Reasons]string{
	"had", "not_stored", "missing", "busy", "stale", "corrupt", "bad_page", "invalid", "abandoned",
}

func (r Reason) String() string { return reasonNames[r] }
