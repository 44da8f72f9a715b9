package tier

import (
	"fmt"
	"regexp"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

// Limits that are no options.
const (
	MaxTiers     = 8
	maxName      = 32      // bytes of a tier's name
	askFirst     = 64      // entries of a chain a shared tier is asked for at first; then as many as it had so far, so that a new prompt costs little
	askMost      = 4096    // entries of one question
	questions    = 64      // questions waiting for a tier; what is more is not asked
	deleteQueue  = 4096    // keys waiting to be deleted; what is more is forgotten
	usesBytes    = 4 << 20 // hashes of look-ups waiting for the search for second uses
	knownEntries = 1 << 18 // entries of which a tier's existence is remembered, 4 MiB a tier
	fullPause    = time.Second
	logEvery     = time.Second // between two lines of one kind about one tier
	hintAge      = 10 * time.Second
	maxPrefill   = 1e9 // tokens a second
)

// When says which blocks are written to a tier.
type When uint8

// The occasions. A block that a tier has already is not written again.
const (
	Never       When = iota
	OnSave           // when all shards are committed, or when the block came from a tier farther away
	OnSecondUse      // when a look-up finds it in memory
	OnEvict          // when it is among the next to be evicted, as far as the tier is quick enough
)

var whens = [...]string{"never", "save", "second-use", "evict"}

func (w When) String() string {
	if int(w) < len(whens) {
		return whens[w]
	}
	return fmt.Sprintf("when %d", uint8(w))
}

// ParseWhen reads the name of an occasion.
func ParseWhen(name string) (When, error) {
	for i, w := range whens {
		if w == name {
			return When(i), nil
		}
	}
	return 0, fmt.Errorf("write: %q, allowed: never, save, second-use, evict", name)
}

// Tier is one store of a stack and how it is used. The zero value of a field with a default means that.
type Tier struct {
	Name  string // 1 to 32 of a-z, 0-9 and -, for people and metrics
	Store pool.Store
	// Local says that the store's Exists answers from memory, at once: then it is asked in the look-up itself, and what it says is exact. Others
	// are asked in the background, and what they said is believed for a while.
	Local bool
	Write When

	Workers     int           // batches at once, 1 to 64, 4; at most half of them, but one at least, write
	Askers      int           // questions at once to a shared store, 1 to 64, 2
	BatchBytes  int64         // bytes of one batch, 4 KiB to 1 GiB, 8 MiB; a larger block is a batch of its own
	BatchItems  int           // shards of one batch, 1 to 4096, 64
	PutQueue    int           // entries waiting to be written, 1 to 2^20, 16,384; one more is not written
	FetchWithin time.Duration // one Get, 1 ms to 5 min, 2 s
	PutWithin   time.Duration // one Put or Delete, 1 ms to 5 min, 5 s
	AskWithin   time.Duration // one Exists, 1 ms to 1 min, 100 ms: so long a look-up may be told pending
	FoundFor    time.Duration // a shared store is believed to have an entry, 10 ms to 1 h, 10 s
	AbsentFor   time.Duration // ... and not to have it, 10 ms to 1 h, 2 s
	BreakAfter  int           // failures in a row until nobody asks the store any more, 1 to 1000, 3
	BreakFirst  time.Duration // until it is tried again, 1 ms to 10 min, 500 ms; doubles with each failed try
	BreakLast   time.Duration // at most, BreakFirst to 1 h, 10 s
}

// Options of a stack. The zero value of a field with a default means that.
type Options struct {
	// PrefetchBytes bounds the bytes of promises that have not come yet, 64 KiB to the memory's size, an eighth of it: what is promised takes the place
	// of what is least worth in memory, and no more than this at a time.
	PrefetchBytes int64
	// PrefillTokens is how many tokens a second an engine computes, 0 to 10^9. An answer is cut where bringing blocks up would take longer, by what was measured of
	// the tier, than computing them. 0: it is not.
	PrefillTokens float64
	// PromiseWithin is how long a promise may be open, from when it is made, 10 ms to 1 h: then it
	// ends as one that did not come. 0: a minute, or twice as long as the tiers' FetchWithin
	// together if that is more.
	PromiseWithin time.Duration
	// LearnPrefill takes what Computed tells of each space instead of PrefillTokens, which must be 0.
	LearnPrefill bool
	// Staging is where values lie on their way. Nil: the stack makes its own, of the default size.
	Staging *transit.Staging
	// State is the file that keeps which spaces were reset, and what is still to be collected, see
	// spaces.go. Empty: they are forgotten with the process, which is right only if no tier
	// outlives it.
	State string
	// EpochEvery is how often shared tiers are asked for resets of other nodes, 10 ms to 1 h, 5 s.
	EpochEvery time.Duration
	// CollectAfter is how long a name that nobody uses any more stays in the tiers, 100 ms to 30
	// days, 10 min: from the reset that left it behind, or since the engine of a private space is
	// gone, or since the start of this process. As long after that a second look takes what others
	// wrote late.
	CollectAfter time.Duration
	// CollectUnused is how long no node may have used a named generation before what it has in the
	// tiers is collected, 10 min and 100 EpochEvery to 90 days. 0: it is not, by this node.
	CollectUnused time.Duration
	// CollectRate is how many keys a second a collection looks at or deletes, 1 to 1,000,000,
	// 5,000.
	CollectRate int
	// NoSums says that memory does not make checksums (integrity header): then what is written to a tier is not compared with them first.
	NoSums bool
	Node   string // named as the source of what is stored; at most 32 bytes are kept
	// Log is told of changes of state and of damage, at most once a second of each kind and tier; it must not block. Nil: nobody is.
	Log   func(tier, what string, err error)
	Clock func() time.Time // nil is time.Now

	ownStaging bool
	step       func() // tests: called without locks wherever a promise may meet another state of its tier
}

// DefaultStaging is the size of Staging a stack makes for itself, bytes. It is address space until it is used.
const DefaultStaging = 256 << 20

func (o *Options) complete(m Memory) error {
	capacity := m.Stats().Capacity
	if o.PrefetchBytes == 0 {
		o.PrefetchBytes = max(capacity/8, 64<<10)
	}
	if o.PrefetchBytes < 64<<10 || o.PrefetchBytes > max(capacity, 64<<10) {
		return fmt.Errorf("tier: PrefetchBytes is %d, allowed: %d to %d", o.PrefetchBytes, 64<<10, capacity)
	}
	if !(o.PrefillTokens >= 0 && o.PrefillTokens <= maxPrefill) || o.LearnPrefill && o.PrefillTokens != 0 {
		return fmt.Errorf("tier: PrefillTokens is %v, allowed: 0 to 1e9, and 0 with LearnPrefill", o.PrefillTokens)
	}
	if o.Clock == nil {
		o.Clock = time.Now
	}
	if err := o.completeEpochs(); err != nil {
		return err
	}
	if o.Log == nil {
		o.Log = func(string, string, error) {}
	}
	o.Node = o.Node[:min(len(o.Node), transit.MaxNode)]
	if o.Staging == nil {
		s, err := transit.OpenStaging(DefaultStaging)
		if err != nil {
			return err
		}
		o.Staging, o.ownStaging = s, true
	}
	return nil
}

var validName = regexp.MustCompile(`^[a-z0-9-]{1,32}$`)

// complete fills defaults in and checks ranges.
func (t *Tier) complete() error {
	if !validName.MatchString(t.Name) {
		return fmt.Errorf("tier: Name is %q, allowed: 1 to %d of a-z, 0-9 and -", t.Name, maxName)
	}
	if t.Store == nil || t.Write > OnEvict {
		return fmt.Errorf("tier %s: Store is nil or Write is %v, allowed: a store, and never, save, second-use or evict", t.Name, t.Write)
	}
	for _, f := range []struct {
		name           string
		v              *int
		def, low, high int
	}{
		{"Workers", &t.Workers, 4, 1, 64}, {"Askers", &t.Askers, 2, 1, 64}, {"BatchItems", &t.BatchItems, 64, 1, 4096},
		{"PutQueue", &t.PutQueue, 16384, 1, 1 << 20}, {"BreakAfter", &t.BreakAfter, 3, 1, 1000},
	} {
		if *f.v == 0 {
			*f.v = f.def
		}
		if *f.v < f.low || *f.v > f.high {
			return fmt.Errorf("tier %s: %s is %d, allowed: %d to %d", t.Name, f.name, *f.v, f.low, f.high)
		}
	}
	if t.BatchBytes == 0 {
		t.BatchBytes = 8 << 20
	}
	if t.BatchBytes < 4<<10 || t.BatchBytes > 1<<30 {
		return fmt.Errorf("tier %s: BatchBytes is %d, allowed: %d to %d", t.Name, t.BatchBytes, 4<<10, 1<<30)
	}
	return t.completeTimes()
}

func (t *Tier) completeTimes() error {
	for _, f := range []struct {
		name           string
		v              *time.Duration
		def, low, high time.Duration
	}{
		{"FetchWithin", &t.FetchWithin, 2 * time.Second, time.Millisecond, 5 * time.Minute},
		{"PutWithin", &t.PutWithin, 5 * time.Second, time.Millisecond, 5 * time.Minute},
		{"AskWithin", &t.AskWithin, 100 * time.Millisecond, time.Millisecond, time.Minute},
		{"FoundFor", &t.FoundFor, 10 * time.Second, 10 * time.Millisecond, time.Hour},
		{"AbsentFor", &t.AbsentFor, 2 * time.Second, 10 * time.Millisecond, time.Hour},
		{"BreakFirst", &t.BreakFirst, 500 * time.Millisecond, time.Millisecond, 10 * time.Minute},
	} {
		if *f.v == 0 {
			*f.v = f.def
		}
		if *f.v < f.low || *f.v > f.high {
			return fmt.Errorf("tier %s: %s is %v, allowed: %v to %v", t.Name, f.name, *f.v, f.low, f.high)
		}
	}
	if t.BreakLast == 0 {
		t.BreakLast = max(10*time.Second, t.BreakFirst)
	}
	if t.BreakLast < t.BreakFirst || t.BreakLast > time.Hour {
		return fmt.Errorf("tier %s: BreakLast is %v, allowed: %v to %v", t.Name, t.BreakLast, t.BreakFirst, time.Hour)
	}
	return nil
}

// The range of PromiseWithin, and what it is at least unless it is given.
const (
	MinPromiseWithin = 10 * time.Millisecond
	MaxPromiseWithin = time.Hour
	promiseWithin    = time.Minute
)

// completePromises checks PromiseWithin, or makes it long enough for one fetch of every tier and
// the wait for each.
func (p *Pool) completePromises() error {
	o := &p.o
	if o.PromiseWithin == 0 {
		all := time.Duration(0)
		for _, l := range p.lanes {
			all += l.FetchWithin
		}
		o.PromiseWithin = min(max(promiseWithin, 2*all), MaxPromiseWithin)
	}
	if o.PromiseWithin < MinPromiseWithin || o.PromiseWithin > MaxPromiseWithin {
		return fmt.Errorf("tier: PromiseWithin is %v, allowed: %v to %v",
			o.PromiseWithin, MinPromiseWithin, MaxPromiseWithin)
	}
	return nil
}

// The ranges of EpochEvery, CollectAfter, CollectUnused and CollectRate.
const (
	MinEpochEvery   = 10 * time.Millisecond
	MaxEpochEvery   = time.Hour
	MinCollectAfter = 100 * time.Millisecond
	MaxCollectAfter = 30 * 24 * time.Hour
	MaxCollectRate  = 1_000_000

	MaxCollectUnused = 90 * 24 * time.Hour
	collectRounds    = 100
)

// LeastCollectUnused is the least CollectUnused for an EpochEvery: so that a use mark is put long
// before it is missed.
func LeastCollectUnused(epochEvery time.Duration) time.Duration {
	return max(10*time.Minute, collectRounds*epochEvery)
}

func (o *Options) completeEpochs() error {
	if o.EpochEvery == 0 {
		o.EpochEvery = 5 * time.Second
	}
	if o.CollectAfter == 0 {
		o.CollectAfter = 10 * time.Minute
	}
	if o.CollectRate == 0 {
		o.CollectRate = 5000
	}
	least := LeastCollectUnused(o.EpochEvery)
	switch {
	case o.CollectUnused != 0 && (o.CollectUnused < least || o.CollectUnused > MaxCollectUnused):
		return fmt.Errorf("tier: CollectUnused is %v, allowed: 0, or %v to %v (%d times EpochEvery at least)",
			o.CollectUnused, least, MaxCollectUnused, collectRounds)
	case o.EpochEvery < MinEpochEvery || o.EpochEvery > MaxEpochEvery:
		return fmt.Errorf("tier: EpochEvery is %v, allowed: %v to %v", o.EpochEvery, MinEpochEvery, MaxEpochEvery)
	case o.CollectAfter < MinCollectAfter || o.CollectAfter > MaxCollectAfter:
		return fmt.Errorf("tier: CollectAfter is %v, allowed: %v to %v",
			o.CollectAfter, MinCollectAfter, MaxCollectAfter)
	case o.CollectRate < 1 || o.CollectRate > MaxCollectRate:
		return fmt.Errorf("tier: CollectRate is %d, allowed: 1 to %d", o.CollectRate, MaxCollectRate)
	}
	return nil
}
