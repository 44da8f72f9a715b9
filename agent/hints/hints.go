// Package hints carries out what engines and orchestrators tell of how blocks will be used: facts
// of the end of requests, and wishes to retain, pin, demote, drop, prefetch or fetch blocks. It
// bounds them, and says what became of each (docs/STEERING.md).
package hints

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Kind is what an action does. The numbers are those of the protocol.
type Kind uint8

// The kinds of actions.
const (
	Retain   Kind = iota + 1 // ranks blocks by a priority for a time
	Pin                      // excludes blocks from eviction for a time
	Demote                   // evicts blocks before others
	Drop                     // drops blocks from memory, at once or after a time in which nothing used them
	Prefetch                 // brings blocks from lower tiers into memory
	Fetch                    // copies blocks from another agent
)

var kindNames = [...]string{
	Retain: "kv.retain", Pin: "kv.pin", Demote: "kv.demote", Drop: "kv.drop", Prefetch: "kv.prefetch",
	Fetch: "kv.fetch",
}

func (k Kind) String() string { return kindNames[k] }

// MarshalText implements encoding.TextMarshaler.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (k *Kind) UnmarshalText(text []byte) error {
	n, err := numberOf("action", string(text), kindNames[1:])
	*k = Kind(n)
	return err
}

// numberOf returns the number of a name, which counts from 1.
func numberOf(what, text string, names []string) (int, error) {
	i := slices.Index(names, text)
	if i < 0 {
		return 0, fmt.Errorf("%s: %q, allowed: %s", what, text, strings.Join(names, ", "))
	}
	return i + 1, nil
}

// State is what became of an action.
type State uint8

// The states of actions.
const (
	Accepted State = iota + 1 // it was carried out
	Clipped                   // it was carried out for fewer blocks or a shorter time
	Deferred                  // it goes on; another receipt follows
	Rejected                  // nothing was done
	Missing                   // nothing that it concerns is stored
)

var stateNames = [...]string{
	Accepted: "accepted", Clipped: "clipped", Deferred: "deferred", Rejected: "rejected", Missing: "missing",
}

func (s State) String() string { return stateNames[s] }

// MarshalText implements encoding.TextMarshaler.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *State) UnmarshalText(text []byte) error {
	n, err := numberOf("state", string(text), stateNames[1:])
	*s = State(n)
	return err
}

// Limits of a ledger.
const (
	MaxTime     = 24 * time.Hour // of an action
	DefaultTime = 5 * time.Minute
	MaxActions  = 16   // of one hint
	MaxName     = 128  // bytes of an action's ID, and of a session's name
	MaxSessions = 4096 // remembered
	// MaxBlocks bounds the blocks of remembered sessions, and those of actions that go on.
	MaxBlocks   = 1 << 18
	MaxWaiting  = 64 // prefetches; a further one is rejected
	MaxReceipts = 256

	// Parts of memory that retained blocks may take: those of one session, or of all requests
	// without one, and all together. What is pinned has a budget of its own.
	sessionPart, allPart = 16, 4
)

// Action is a wish about blocks.
type Action struct {
	ID       string        `json:"id,omitempty"` // for its receipt
	Kind     Kind          `json:"action"`
	Priority uint8         `json:"priority,omitempty"` // of Retain, 0 to 100; 50 is as without
	For      time.Duration `json:"-"`                  // of Drop: after how long; 0 is DefaultTime, of Drop at once
	Peer     string        `json:"from,omitempty"`     // of Fetch: host:port of the agent that has the blocks
}

// Check returns an error that names the field that is out of range.
func (a *Action) Check() error {
	switch {
	case a.Kind < Retain || a.Kind > Fetch:
		return errors.New("action: missing, allowed: " + strings.Join(kindNames[1:], ", "))
	case len(a.ID) > MaxName:
		return fmt.Errorf("id: %d bytes, allowed: at most %d", len(a.ID), MaxName)
	case a.Priority > 100:
		return fmt.Errorf("priority: %d, allowed: 0 to 100", a.Priority)
	case a.For < 0 || a.For > MaxTime:
		return fmt.Errorf("seconds: %g, allowed: 0 to %g", a.For.Seconds(), MaxTime.Seconds())
	case a.Kind == Fetch && a.Peer == "":
		return errors.New("from: missing, allowed: host:port of the agent that has the blocks")
	}
	return nil
}

// Chain is a run of chained blocks of one group. The session was the first to store those whose bit
// in Own is set, from the lowest on.
type Chain struct {
	Group  uint8
	Hashes pool.Hashes
	Own    []byte
}

// clone returns a chain in memory of its own.
func (c *Chain) clone() Chain {
	return Chain{Group: c.Group, Hashes: c.pick(func(int) bool { return true }), Own: slices.Clone(c.Own)}
}

func (c *Chain) owns(i int) bool { return i/8 < len(c.Own) && c.Own[i/8]>>(i%8)&1 != 0 }

// own returns what the session was the first to store.
func (c *Chain) own() Chain { return Chain{Group: c.Group, Hashes: c.pick(c.owns)} }

func (c *Chain) pick(wanted func(i int) bool) pool.Hashes {
	blob := make([]byte, 0, c.Hashes.N*c.Hashes.Len)
	for i := range c.Hashes.N {
		if wanted(i) {
			blob = append(blob, c.Hashes.At(i)...)
		}
	}
	return pool.Chain(blob, c.Hashes.Len)
}

// Hint is what one party tells of blocks of one space.
type Hint struct {
	Space   pool.SpaceID
	Session string // of the client; empty: not told
	// Part is the same for the parts of one hint of a long prompt, which come one after another.
	Part    uint32
	Finish  pool.Finish
	Output  uint32 // tokens that the request generated; 0: not told
	Actions []Action
	Chains  []Chain
	// Exact: what lowers the rank of blocks is about all of Chains. Otherwise it is about what the
	// session was the first to store.
	Exact bool
	// Later is told of the receipts of deferred actions once they are over; nil: nobody is.
	Later func(Receipt)
}

// Receipt says what became of an action.
type Receipt struct {
	ID      string    `json:"id"`
	Kind    Kind      `json:"action"`
	State   State     `json:"state"`
	Reason  string    `json:"reason,omitempty"`
	Blocks  int       `json:"blocks"` // that it concerns
	Bytes   int64     `json:"bytes"`
	At      time.Time `json:"at"`
	Session string    `json:"session,omitempty"`
	// Over: its time has ended. Of its blocks, Helped were used in time, or, of those to be evicted
	// first, were not; InVain are the others.
	Over   bool `json:"over"`
	Helped int  `json:"helped"`
	InVain int  `json:"in_vain"`
}
