package disk

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvagent/kvagent/pool"
)

// run is a range of neighbouring blocks in one segment, read together. A reader owns it from its
// claim on. Nothing accesses the items after the run was given up.
type run struct {
	d        *dir
	seg      *segment // held open
	off, end int64
	parts    []part
	claim    atomic.Int32
	call     *getCall
	done     chan struct{} // closed when a reader that claimed it has delivered
}

// States of a run's claim.
const (
	unclaimed  int32 = 0
	delivering int32 = 1
	givenUp    int32 = 2
)

type part struct {
	item *pool.Item
	tag  tag
	place
}

// getCall waits for its runs.
type getCall struct {
	left atomic.Int32
	done chan struct{}
}

func (c *getCall) finished(n int32) {
	if c.left.Add(-n) == 0 {
		close(c.done)
	}
}

// lookAgain is the status of a block that moved while it was read; it is not returned to callers.
const lookAgain pool.Status = 254

const getPasses = 4 // that a block may move

// Get reads items. It compares each with its key, length and checksum; on a mismatch the block is
// Corrupt, counted, and dropped.
func (s *Store) Get(ctx context.Context, items []pool.Item) error {
	if err := s.enter(ctx, s.gets); err != nil {
		return s.refused(err, items)
	}
	defer s.leave(s.gets)
	for i := range items {
		items[i].Status = lookAgain
	}
	for range getPasses {
		runs := s.plan(items)
		if len(runs) == 0 {
			continue // all are decided, or the rest has just moved
		}
		if err := s.fetch(ctx, runs); err != nil {
			undecided(items, pool.Busy)
			return err
		}
	}
	undecided(items, pool.Missing)
	for i := range items {
		s.count.get(&items[i])
	}
	return nil
}

func undecided(items []pool.Item, status pool.Status) {
	for i := range items {
		if items[i].Status == lookAgain {
			items[i].Status = status
		}
	}
}

// plan looks up the items still to be read, and makes runs of neighbours.
func (s *Store) plan(items []pool.Item) (runs []*run) {
	var parts []part
	for i := range items {
		if items[i].Status == lookAgain {
			if p, ok := s.lookUp(&items[i]); ok {
				parts = append(parts, p)
			}
		}
	}
	slices.SortFunc(parts, func(a, b part) int {
		return cmp.Or(cmp.Compare(a.segment, b.segment), cmp.Compare(a.at, b.at))
	})
	for _, p := range parts {
		end := p.off() + recordBytes(int(p.length))
		if n := len(runs); n > 0 {
			r := runs[n-1]
			if r.seg.handle == p.segment && p.off() == r.end && end-r.off <= int64(s.o.ReadBytes) {
				r.parts, r.end = append(r.parts, p), end
				continue
			}
		}
		seg := s.handles.hold(p.segment)
		if seg == nil {
			continue // just evicted: the next pass sees it
		}
		runs = append(runs, &run{d: s.choose(&p.item.Key), seg: seg, off: p.off(), end: end, parts: []part{p}})
	}
	return runs
}

func (s *Store) lookUp(it *pool.Item) (part, bool) {
	if !valid(&it.Key) {
		it.Status = pool.Invalid
		return part{}, false
	}
	p := part{item: it, tag: s.tagOf(&it.Key)}
	var ok bool
	if p.place, ok = s.index.get(p.tag); !ok || !s.choose(&it.Key).readable.Load() {
		it.Status = pool.Missing
		return part{}, false
	}
	if int(p.length) != len(it.Data) {
		it.Status = pool.Invalid
		return part{}, false
	}
	return p, true
}

// fetch has the runs read and waits for them. When ctx ends, it gives up the runs that no reader is
// delivering.
func (s *Store) fetch(ctx context.Context, runs []*run) error {
	call := &getCall{done: make(chan struct{})}
	call.left.Store(int32(len(runs)))
	shares := map[*dir][]*run{}
	for _, r := range runs {
		r.call, r.done = call, make(chan struct{})
		shares[r.d] = append(shares[r.d], r)
	}
	if len(shares) == 1 {
		submit(ctx, runs)
	} else {
		var all sync.WaitGroup
		for _, share := range shares {
			all.Go(func() { submit(ctx, share) })
		}
		all.Wait()
	}
	select {
	case <-call.done: // possibly because submit gave runs up
	case <-ctx.Done():
	}
	given := false
	for _, r := range runs {
		r.claim.CompareAndSwap(unclaimed, givenUp)
		if r.claim.Load() == delivering {
			<-r.done
		} else {
			given = true
		}
	}
	if !given {
		return nil
	}
	return ctx.Err()
}

// submit passes a call's runs of one directory to the readers, all of them before those of the next
// call. If calls shared the readers, all would end late and together. Runs that no reader has taken
// when ctx ends are given up.
func submit(ctx context.Context, runs []*run) {
	turn := runs[0].d.turn
	select {
	case turn <- struct{}{}:
		defer func() { <-turn }()
	case <-ctx.Done():
	}
	for _, r := range runs {
		select {
		case r.d.reads <- r:
		case <-ctx.Done():
			r.claim.Store(givenUp)
			_ = r.seg.release() // only read
			r.call.finished(1)
		}
	}
}

// Exists returns what Get would find, from memory alone, and does not count as a use.
func (s *Store) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(status) != len(keys) {
		return errors.New("disk: Exists wants one status for each key")
	}
	for i := range keys {
		switch _, ok := s.index.get(s.tagOf(&keys[i])); {
		case !valid(&keys[i]):
			status[i] = pool.Invalid
		case ok && s.choose(&keys[i]).readable.Load():
			status[i] = pool.OK
		default:
			status[i] = pool.Missing
		}
	}
	return nil
}
