// Package fault wraps a store and injects, from one seed, faults of disks, networks and servers.
//
// A pool.Store returns exactly the bytes put or another status, so each store has checksums against
// faults of its own medium. Such faults are injected inside the store: pool/disk has hooks, and the
// shared stores are tested against real servers. This package injects faults outside the store, and
// so breaks its promise: no store can detect Flip and FlipPut. The layer above does. pool/tier
// compares the checksum that memory made when the block was saved (pool.Sum over pool.Key.Seed)
// before it uses a block; pooltest.TestFaultyStore does the same.
package fault

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Kind is a kind of fault. Faults of calls are drawn once a batch, faults of items once for each
// item or key.
type Kind uint8

// The kinds, in the order a call meets them.
const (
	Hang       Kind = iota // call: it does nothing until the context ends, or continues when Hang is switched off
	Delay                  // call: it begins late, by up to Options.MaxDelay
	Error                  // call: it fails with ErrInjected and did nothing
	LostReply              // call: it fails with ErrInjected and did everything
	Full                   // item of Put: Busy and not stored
	FlipPut                // item of Put: one bit is flipped before it is stored; the status is OK
	Flip                   // item of Get: one bit is flipped; the status is OK
	Short                  // item of Get: the end of the bytes is missing; the status is Corrupt
	LostDelete             // key of Delete: it is not deleted, without an error
	kinds
)

var names = [kinds]string{"hang", "delay", "error", "lost-reply", "full", "flip-put", "flip", "short", "lost-delete"}

func (k Kind) String() string {
	if k < kinds {
		return names[k]
	}
	return fmt.Sprintf("fault kind %d", uint8(k))
}

// Kinds returns all kinds.
func Kinds() (all []Kind) {
	for k := range kinds {
		all = append(all, k)
	}
	return all
}

// ErrInjected is the error of injected failures.
var ErrInjected = errors.New("fault: injected error")

// maxDelay bounds Options.MaxDelay.
const maxDelay = time.Hour

// Options of a faulty store.
type Options struct {
	Seed  uint64           // each kind draws from its own stream, so that switching one changes no other
	Rates map[Kind]float64 // probability of each kind, 0 to 1; default 0

	MaxDelay time.Duration // of Delay, 0 to 1 h; delays are uniform from 0 to this
	// Sleep waits for d, or returns ctx's error if ctx ends first. Nil: the real clock.
	Sleep func(ctx context.Context, d time.Duration) error
}

// Every returns options with all kinds at one rate, and delays of up to 2 ms.
func Every(seed uint64, rate float64) Options {
	o := Options{Seed: seed, Rates: map[Kind]float64{}, MaxDelay: 2 * time.Millisecond}
	for _, k := range Kinds() {
		o.Rates[k] = rate
	}
	return o
}

// Store is a store with faults. Its methods may run concurrently.
type Store struct {
	below    pool.Store
	maxDelay time.Duration
	sleep    func(ctx context.Context, d time.Duration) error

	mu    sync.Mutex
	dice  [kinds]*rand.Rand
	rates [kinds]float64
	off   [kinds]bool
	count [kinds]uint64
	awake chan struct{} // closed and replaced when Hang is switched off
}

// New wraps a store. All kinds with a rate are on.
func New(below pool.Store, o Options) (*Store, error) {
	s := &Store{below: below, maxDelay: o.MaxDelay, sleep: o.Sleep, awake: make(chan struct{})}
	if o.MaxDelay < 0 || o.MaxDelay > maxDelay {
		return nil, fmt.Errorf("fault: MaxDelay is %v, must be 0 to %v", o.MaxDelay, maxDelay)
	}
	for k, rate := range o.Rates {
		if err := s.SetRate(k, rate); err != nil {
			return nil, err
		}
	}
	for k := range s.dice {
		s.dice[k] = rand.New(rand.NewPCG(o.Seed, uint64(k)))
	}
	if s.sleep == nil {
		s.sleep = sleep
	}
	return s, nil
}

// SetRate sets the probability of a kind, 0 to 1.
func (s *Store) SetRate(k Kind, rate float64) error {
	if k >= kinds {
		return fmt.Errorf("fault: Rates has %v, must be 0 to %d", k, kinds-1)
	}
	if !(rate >= 0 && rate <= 1) {
		return fmt.Errorf("fault: Rates[%v] is %v, must be 0 to 1", k, rate)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rates[k] = rate
	return nil
}

// Switch switches kinds on or off, all if none is named; their rates stay. Calls that hang continue
// when Hang is switched off.
func (s *Store) Switch(on bool, which ...Kind) {
	if len(which) == 0 {
		which = Kinds()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range which {
		s.off[k] = !on
		if k == Hang && !on {
			close(s.awake)
			s.awake = make(chan struct{})
		}
	}
}

// Counts returns how often each kind happened.
func (s *Store) Counts() map[Kind]uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	counts := make(map[Kind]uint64, kinds)
	for k, n := range s.count {
		counts[Kind(k)] = n
	}
	return counts
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// hits draws whether a fault happens now, and counts it.
func (s *Store) hits(k Kind) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.off[k] || s.rates[k] == 0 || s.dice[k].Float64() >= s.rates[k] {
		return false
	}
	s.count[k]++
	return true
}

// draw returns a number below n from a kind's own stream.
func (s *Store) draw(k Kind, n int64) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dice[k].Int64N(n)
}

// begin injects the faults that a call meets before it reaches the store.
func (s *Store) begin(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := s.hang(ctx); err != nil {
		return err
	}
	if s.maxDelay > 0 && s.hits(Delay) {
		if err := s.sleep(ctx, time.Duration(s.draw(Delay, int64(s.maxDelay)+1))); err != nil {
			return err
		}
	}
	if s.hits(Error) {
		return ErrInjected
	}
	return nil
}

func (s *Store) hang(ctx context.Context) error {
	s.mu.Lock()
	awake := s.awake // read before the draw, so that switching Hang off after it wakes this call
	s.mu.Unlock()
	if !s.hits(Hang) {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-awake:
		return nil
	}
}

// end injects the faults that a call meets after the store.
func (s *Store) end(err error) error {
	if err == nil && s.hits(LostReply) {
		return ErrInjected
	}
	return err
}

// flip flips one random bit.
func (s *Store) flip(k Kind, p []byte) {
	if len(p) > 0 {
		bit := s.draw(k, int64(len(p))*8)
		p[bit/8] ^= 1 << (bit % 8)
	}
}
