package peer

import (
	"time"

	"github.com/kvagent/kvagent/backoff"
	"github.com/kvagent/kvagent/pool"
)

// delayed are blocks of a fetch that the peer has and that could not be reserved here: another job
// is storing them, or no slot was free. They are tried again after pauses that double, for so many
// in a row in which no fetch of the client has stored anything.
type delayed struct {
	blocks []delayedBlock
	pause  backoff.Backoff      // since some fetch has stored something
	tries  int                  // since then
	stored uint64               // blocks of all fetches, at the last try
	full   [pool.MaxGroups]bool // by group of the request: some block found no slot since the last try
	due    time.Time            // the next try; zero: not decided yet
}

type delayedBlock struct {
	number uint32 // in the subscription
	why    Reason // Had: another job is storing it; Busy: no slot was free
}

// The pauses, 1.27 s in all.
const (
	firstDelay = 10 * time.Millisecond
	lastDelay  = 640 * time.Millisecond
	delays     = 7
)

// delay puts a block off. It returns false if it has failed for another reason. f.mu is held.
func (f *fetch) delay(p *part, number uint32) bool {
	switch {
	case p.failed && p.reason == Busy:
		f.later.full[f.groupOf(number)] = true
		f.later.blocks = append(f.later.blocks, delayedBlock{number, Busy})
	case p.busy && !p.failed:
		f.later.blocks = append(f.later.blocks, delayedBlock{number, Had})
	default:
		return false
	}
	return true
}

// full puts a stretch off without a try if a block before it found no slot since the last try: it
// could not be found without that one, and room for it would be made by evicting the prompt's own
// blocks.
func (f *fetch) full(b stretch) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.later.full[b.group] {
		return false
	}
	base := f.base(b.group)
	for i := b.from; i < b.to; i++ {
		f.later.blocks = append(f.later.blocks, delayedBlock{base + uint32(i), Busy})
	}
	return true
}

// groupOf returns the group of the request that a block is of.
func (f *fetch) groupOf(number uint32) (group int) {
	for number >= f.base(group+1) {
		group++
	}
	return group
}

// retry queues delayed blocks again when it is time, or gives them up; then again is true.
// Otherwise it returns what to wait for, if anything is to be tried.
func (f *fetch) retry() (due <-chan time.Time, again bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	d := &f.later
	if len(d.blocks) == 0 || f.parts > 0 {
		return nil, false // this fetch comes back when its own blocks are settled
	}
	if d.due.IsZero() {
		if stored := f.client.stored.Load(); stored != d.stored {
			d.pause.Reset()
			d.stored, d.tries = stored, 0
		}
		if d.tries >= delays {
			for _, b := range d.blocks {
				f.outcome.Failed[b.why]++
			}
			d.blocks = nil
			return nil, true
		}
		d.due = time.Now().Add(d.pause.Next())
	}
	if left := time.Until(d.due); left > 0 {
		return time.After(left), false
	}
	d.tries++
	for _, b := range d.blocks {
		if n := len(f.queue); n > 0 && f.queue[n-1].first+f.queue[n-1].count == b.number {
			f.queue[n-1].count++
		} else {
			f.queue = append(f.queue, run{b.number, 1})
		}
	}
	d.blocks, d.due, d.full = nil, time.Time{}, [pool.MaxGroups]bool{}
	return nil, true
}
