// Package remote is a store of other machines as a node sees it: the state that it shows, what this node has stored in it, how its values are named and what its
// options may be. Each of them speaks to its servers in its own package.
package remote

import (
	"sync"

	"github.com/kvagent/kvagent/pool"
)

// State is what a store shows of itself.
type State uint8

// The states. No store has all of them.
const (
	OK     State = iota
	Full         // it has no room and makes none: blocks are read, and none is stored
	Lost         // nobody answers
	Denied       // it refuses: keys, policy, or no such place
	Slow         // it asks for fewer requests, or has an error of its own
)

func (s State) String() string { return [...]string{"ok", "full", "lost", "denied", "slow"}[s] }

// Told hears of a change of state; it must not call the store.
type Told func(from, to State, reason error)

// Condition is the state of a store now. Its methods may run at once.
type Condition struct {
	told Told // nil: nobody is

	mu     sync.Mutex
	state  State
	reason error // why it is that
}

// NewCondition begins with a state that nobody is told of.
func NewCondition(first State, told Told) *Condition { return &Condition{told: told, state: first} }

// State is the state now.
func (c *Condition) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state
}

// Report is the state now, with what the store counted.
func (c *Condition) Report(counts ...pool.Count) pool.StoreReport {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := pool.StoreReport{State: c.state.String(), Counts: counts}
	if c.state != OK && c.reason != nil {
		r.Reason = c.reason.Error()
	}
	return r
}

// Turn changes the state, and tells if it was another one.
func (c *Condition) Turn(to State, reason error) {
	c.TurnIf(func() bool { return true }, to, reason)
}

// TurnIf is Turn, unless still says no. still must not call the condition; nothing else changes the state while it runs.
func (c *Condition) TurnIf(still func() bool, to State, reason error) {
	c.mu.Lock()
	from, turns := c.state, still()
	if turns {
		c.state, c.reason = to, reason
	}
	c.mu.Unlock()
	if turns && from != to && c.told != nil {
		c.told(from, to, reason)
	}
}
