// Package remote is what stores on other machines have in common: the state that a store reports,
// how its values are named, and the ranges of its options. Each store talks to its servers in its
// own package.
package remote

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// ErrAnswer is wrapped by the error of a call whose server sent what was not asked for. Nothing
// reads it, and the connection ends.
var ErrAnswer = errors.New("not an answer to what was asked")

// State is the state of a store as this node sees it.
type State uint8

// The states. No store has all of them.
const (
	OK     State = iota
	Full         // there is no room: blocks are read, none is stored
	Lost         // it does not answer
	Denied       // it refuses access: credentials, policy, or no such place
	Slow         // it asks for fewer requests, or reports an internal error
)

func (s State) String() string { return [...]string{"ok", "full", "lost", "denied", "slow"}[s] }

// OnState is called with a change of state. It must not call the store.
type OnState func(from, to State, reason error)

// Condition is the current state of a store. Its methods may run concurrently.
type Condition struct {
	onState OnState // nil: not called

	mu     sync.Mutex
	state  State
	reason error // of the state
}

// NewCondition returns a condition in a first state, for which onState is not called.
func NewCondition(first State, onState OnState) *Condition {
	return &Condition{onState: onState, state: first}
}

// State returns the current state.
func (c *Condition) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state
}

// Report returns the current state and the store's counts, which have names.
func (c *Condition) Report(names []string, counts []atomic.Uint64) pool.StoreReport {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := pool.StoreReport{State: c.state.String()}
	for i, name := range names {
		r.Counts = append(r.Counts, pool.Count{Name: name, N: counts[i].Load()})
	}
	if c.state != OK && c.reason != nil {
		r.Reason = c.reason.Error()
	}
	return r
}

// Set changes the state, and calls OnState if it is another one.
func (c *Condition) Set(to State, reason error) {
	c.mu.Lock()
	from := c.state
	c.state, c.reason = to, reason
	c.mu.Unlock()
	if from != to && c.onState != nil {
		c.onState(from, to, reason)
	}
}

// Valid reports whether a key can be stored.
func Valid(k *pool.Key) bool { return k.Hash.Len >= 1 && k.Hash.Len <= pool.MaxHashLen }

// Name returns the name of a key's value: a prefix and the key's text.
func Name(prefix string, k *pool.Key) string {
	b := make([]byte, 0, len(prefix)+pool.MaxKeyText)
	return string(k.AppendText(append(b, prefix...)))
}

// Between returns an error for an option out of its range, with the store's name.
func Between[T int | int64 | time.Duration](store, name string, v, low, high T) error {
	if v < low || v > high {
		return fmt.Errorf("%s: %s is %v, allowed: %v to %v", store, name, v, low, high)
	}
	return nil
}
