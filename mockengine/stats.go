package mockengine

import (
	"math/bits"
	"time"
)

// Stats has an engine's counters since its start. Blocks are counted once for all ranks, bytes on
// every rank.
type Stats struct {
	BlocksSaved    uint64 `json:"blocks_saved"`
	BytesSaved     uint64 `json:"bytes_saved"`
	BlocksLoaded   uint64 `json:"blocks_loaded"`
	BytesLoaded    uint64 `json:"bytes_loaded"`
	BlocksVerified uint64 `json:"blocks_verified"`
	WrongBytes     uint64 `json:"wrong_bytes"`

	LookupMisses uint64 `json:"lookup_misses"` // look-ups that were not answered: no agent, or too late
	SavesBusy    uint64 `json:"saves_busy"`    // save jobs postponed: queue full, or no revocation word
	SavesRevoked uint64 `json:"saves_revoked"` // save jobs revoked by their word
	LoadsFailed  uint64 `json:"loads_failed"`  // load jobs that did not deliver everything
	LoadsLate    uint64 `json:"loads_late"`    // load jobs abandoned at the deadline
	Preemptions  uint64 `json:"preemptions"`

	LookupTimes Times `json:"lookup_times,omitempty"`
}

// Add adds another engine's counters.
func (s *Stats) Add(o *Stats) {
	for _, f := range []struct{ to, from *uint64 }{
		{&s.BlocksSaved, &o.BlocksSaved}, {&s.BytesSaved, &o.BytesSaved}, {&s.BlocksLoaded, &o.BlocksLoaded},
		{&s.BytesLoaded, &o.BytesLoaded}, {&s.BlocksVerified, &o.BlocksVerified}, {&s.WrongBytes, &o.WrongBytes},
		{&s.LookupMisses, &o.LookupMisses}, {&s.SavesBusy, &o.SavesBusy}, {&s.SavesRevoked, &o.SavesRevoked},
		{&s.LoadsFailed, &o.LoadsFailed}, {&s.LoadsLate, &o.LoadsLate}, {&s.Preemptions, &o.Preemptions},
	} {
		*f.to += *f.from
	}
	s.LookupTimes.Merge(o.LookupTimes)
}

// Times is a histogram of durations: eight buckets for each power of two of nanoseconds, so a
// quantile is accurate to 13 %. The slice is as long as its highest bucket.
type Times []uint32

// Record counts one duration.
func (t *Times) Record(d time.Duration) {
	i := bucket(uint64(max(d, 1)))
	for len(*t) <= i {
		*t = append(*t, 0)
	}
	(*t)[i]++
}

// Merge adds another histogram.
func (t *Times) Merge(o Times) {
	for len(*t) < len(o) {
		*t = append(*t, 0)
	}
	for i, n := range o {
		(*t)[i] += n
	}
}

// Quantile returns the upper end of the bucket that holds quantile q, 0 to 1; 0 with nothing
// recorded.
func (t Times) Quantile(q float64) time.Duration {
	var total, seen uint64
	for _, n := range t {
		total += uint64(n)
	}
	for i, n := range t {
		if seen += uint64(n); n > 0 && float64(seen) >= q*float64(total) {
			return time.Duration(bucketEnd(i))
		}
	}
	return 0
}

func bucket(ns uint64) int {
	if ns < 8 {
		return int(ns)
	}
	e := bits.Len64(ns) - 4 // ns>>e is 8 to 15
	return e*8 + int(ns>>e)
}

func bucketEnd(i int) uint64 {
	if i < 16 {
		return uint64(i)
	}
	e := i/8 - 1
	return (uint64(i%8)+9)<<e - 1
}
