package tier

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/names"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

// Fixed limits.
const (
	MaxTiers     = 8
	maxName      = 32      // bytes of a tier's name
	askFirst     = 64      // entries of a new prompt's chain in a first question; then as many as were found so far
	askMost      = 4096    // entries of one question
	questions    = 64      // questions waiting for a tier; more are not asked
	removalQueue = 1 << 16 // damaged values of a tier waiting to be deleted; more are forgotten until found again
	queuedUses   = 256     // look-ups waiting for the search for second uses; more are dropped
	cacheEntries = 1 << 18 // cells of an existsCache, 4 MiB
	fullPause    = time.Second
	logEvery     = time.Second // between two equal log lines about one tier
	hintAge      = 10 * time.Second
)

// When is the occasion on which blocks are written to a tier.
type When uint8

// The occasions. A block that a tier already has is not written again.
const (
	Never       When = iota
	OnSave           // when all shards are committed, or when the block came from a tier farther away
	OnSecondUse      // when a look-up finds it in memory
)

var whens = [...]string{"never", "save", "second-use"}

func (w When) String() string {
	if int(w) < len(whens) {
		return whens[w]
	}
	return fmt.Sprintf("when %d", uint8(w))
}

// ParseWhen parses the name of an occasion.
func ParseWhen(name string) (When, error) {
	for i, w := range whens {
		if w == name {
			return When(i), nil
		}
	}
	return 0, fmt.Errorf("write: %q, allowed: never, save, second-use", name)
}

// Tier is one store of a stack and how it is used. A zero field has its default, the last number.
type Tier struct {
	Name  string // 1 to 32 of a-z, 0-9 and -, for people and metrics
	Store pool.Store
	// Local means that Exists answers from memory, at once and exactly; look-ups call it directly.
	// Other stores are asked in the background, and their answers are cached for a while.
	Local bool
	Write When

	Workers     int           // concurrent batches, 4; at most half of them, at least one, write
	Askers      int           // concurrent questions to a shared store, 2
	BatchBytes  int64         // bytes of one batch, 8 MiB; a larger block is a batch of its own
	BatchItems  int           // shards of one batch, 64
	PutQueue    int           // entries waiting to be written, 16,384; more are not written
	FetchWithin time.Duration // one Get, 2 s
	PutWithin   time.Duration // one Put or Delete, 5 s
	AskWithin   time.Duration // one Exists, 500 ms
	FoundFor    time.Duration // how long a shared store is believed to have an entry, 10 s
	AbsentFor   time.Duration // ... and to lack it, 2 s
	BreakAfter  int           // failures in a row that open the breaker, 3
	BreakFirst  time.Duration // until the first new try, 500 ms; doubles with each failed try
	BreakLast   time.Duration // longest pause between tries, BreakFirst or more, 10 s
}

// Options of a stack. Fields left zero take their default.
type Options struct {
	// PrefetchBytes bounds the bytes of open promises; default an
	// eighth of it. Promised blocks replace the least valuable ones in memory.
	PrefetchBytes int64
	// PromiseWithin is how long a promise may be open. Default: a minute, or twice
	// the sum of the tiers' FetchWithin if that is more.
	PromiseWithin time.Duration
	// Staging holds values in transit. Nil: the pool makes its own, of DefaultStaging bytes.
	Staging *transit.Staging
	// State is the file of the catalog: the epochs of spaces that were reset. Empty: the catalog
	// ends with the process, which is right only if no tier outlives it.
	State string
	// EpochEvery is how often shared tiers are asked for resets of other nodes, 5 s.
	EpochEvery time.Duration
	// NoSums means that memory has no checksums (integrity header): what is written to a tier is
	// not compared with them.
	NoSums bool
	Node   string // named in headers as the source of a value; at most 32 bytes of it
	// Log is called with changes of state and with damage, at most once a second for each message
	// and tier. It must not block. May be nil.
	Log   func(tier, what string, err error)
	Clock func() time.Time // nil is time.Now
	// Pace is called before bytes of saved blocks are copied out of memory to be written. It may
	// wait, until ctx ends, and its result is called after the copy. Nothing that a request waits
	// for waits with it: fetches have workers of their own, and a tier with one worker, whose
	// fetches would wait, does not call it. Nil: no copy waits.
	Pace func(ctx context.Context, bytes int64) (ended func())

	ownStaging bool
	file       names.File // nil except in tests, which replace State by it
	testHook   func()     // nil except in tests; see callTestHook
}

// DefaultStaging is the size of an agent's Staging in bytes: address space until it is used.
const DefaultStaging = 256 << 20

func (o *Options) complete(m pool.Memory) (err error) {
	capacity := m.Stats().Capacity
	o.PrefetchBytes = cmp.Or(o.PrefetchBytes, max(capacity/8, 64<<10))
	if o.Clock == nil {
		o.Clock = time.Now
	}
	o.EpochEvery = cmp.Or(o.EpochEvery, 5*time.Second)
	if o.Log == nil {
		o.Log = func(string, string, error) {}
	}
	o.Node = o.Node[:min(len(o.Node), transit.MaxNode)]
	if o.Staging == nil {
		o.Staging, err = transit.OpenStaging(DefaultStaging)
		o.ownStaging = true
	}
	return err
}

var validName = regexp.MustCompile(`^[a-z0-9-]{1,32}$`)

// complete sets defaults and checks ranges.
func (t *Tier) complete() error {
	if !validName.MatchString(t.Name) {
		return fmt.Errorf("tier: Name is %q, allowed: 1 to %d of a-z, 0-9 and -", t.Name, maxName)
	}
	t.Workers, t.Askers = cmp.Or(t.Workers, 4), cmp.Or(t.Askers, 2)
	t.BatchItems, t.BatchBytes = cmp.Or(t.BatchItems, 64), cmp.Or(t.BatchBytes, 8<<20)
	t.PutQueue, t.BreakAfter = cmp.Or(t.PutQueue, 16384), cmp.Or(t.BreakAfter, 3)
	t.FetchWithin = cmp.Or(t.FetchWithin, 2*time.Second)
	t.PutWithin = cmp.Or(t.PutWithin, 5*time.Second)
	t.AskWithin = cmp.Or(t.AskWithin, 500*time.Millisecond)
	t.FoundFor, t.AbsentFor = cmp.Or(t.FoundFor, 10*time.Second), cmp.Or(t.AbsentFor, 2*time.Second)
	t.BreakFirst = cmp.Or(t.BreakFirst, 500*time.Millisecond)
	t.BreakLast = cmp.Or(t.BreakLast, max(10*time.Second, t.BreakFirst))
	return nil
}
