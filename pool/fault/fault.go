// Package fault is a store that goes wrong on purpose: it wraps another and injects, from one seed, what disks, networks and servers do.
//
// Who catches what. A pool.Store returns exactly the bytes put or another status, so a store keeps a checksum of its own
// against its medium; faults between a store and its medium are injected inside that store (pool/disk has hooks for it, the
// shared stores are tested against real servers). This package wraps a store from the outside and so breaks that very promise: what
// Flip and FlipPut do, no store can see. The layer above catches them: the tier stack compares the checksum that memory made when the block was
// saved (pool.Sum over pool.Key.Seed) before it shows a block to anyone. pooltest.TestFaultyStore does the same.
package fault

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Kind is one way to go wrong. Those of calls are drawn once a batch, those of items once for each item or key.
type Kind uint8

// The kinds, in the order a call meets them.
const (
	Hang       Kind = iota // call: nothing happens until the context ends, or until Hang is switched off: then it goes on
	Delay                  // call: it begins late, by up to Options.MaxDelay
	Error                  // call: it fails with ErrInjected, and nothing was tried
	LostReply              // call: it fails with ErrInjected, and everything was done
	Full                   // item of Put: Busy, and not stored
	FlipPut                // item of Put: one bit turns on the way in; the store then holds wrong bytes, and says OK
	Flip                   // item of Get: one bit turns on the way out; the status stays OK
	Short                  // item of Get: the end of the bytes does not arrive; the status is Corrupt
	LostDelete             // key of Delete: nothing happens, and nobody says so
	kinds
)

var names = [kinds]string{"hang", "delay", "error", "lost-reply", "full", "flip-put", "flip", "short", "lost-delete"}

func (k Kind) String() string {
	if k < kinds {
		return names[k]
	}
	return fmt.Sprintf("fault kind %d", uint8(k))
}

// Kinds is all of them.
func Kinds() (all []Kind) {
	for k := range kinds {
		all = append(all, k)
	}
	return all
}

// ParseKind gives the kind of a name.
func ParseKind(name string) (Kind, error) {
	for k, n := range names {
		if n == name {
			return Kind(k), nil
		}
	}
	return 0, fmt.Errorf("fault: no kind %q, there are %s", name, strings.Join(names[:], ", "))
}

// ErrInjected is what an injected error is.
var ErrInjected = errors.New("fault: injected error")

// maxDelay bounds Options.MaxDelay.
const maxDelay = time.Hour

// Options of a faulty store.
type Options struct {
	Seed  uint64           // each kind draws from a stream of its own, so that switching one changes no other
	Rates map[Kind]float64 // probability of each kind, 0 to 1; a kind that is not named has 0

	MaxDelay time.Duration // of Delay, 0 to 1 h; a delay is drawn evenly from 0 to this
	// Sleep waits for d, or gives the error of ctx if that ends first. Nil is the real clock.
	Sleep func(ctx context.Context, d time.Duration) error
}

// Every is all kinds at one rate, with delays of up to 2 ms.
func Every(seed uint64, rate float64) Options {
	o := Options{Seed: seed, Rates: map[Kind]float64{}, MaxDelay: 2 * time.Millisecond}
	for _, k := range Kinds() {
		o.Rates[k] = rate
	}
	return o
}

// Store is a store that goes wrong. Its methods may run at once.
type Store struct {
	below    pool.Store
	maxDelay time.Duration
	sleep    func(ctx context.Context, d time.Duration) error

	mu    sync.Mutex
	dice  [kinds]*rand.Rand
	rates [kinds]float64
	off   [kinds]bool
	count [kinds]uint64
	awake chan struct{} // closed and made anew when Hang is switched off
}

// New wraps a store. All kinds with a rate are switched on.
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

// SetRate changes the probability of a kind, 0 to 1.
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

// Switch turns kinds on or off; their rates stay. Without kinds it turns all. Calls that hang go on when Hang is turned off.
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

// Counts is how often each kind happened.
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
