package disk

import (
	"context"
	"errors"
	"sync"

	"github.com/kvagent/kvagent/pool"
)

// Put stores the items, and waits until they are written. It waits for room in memory, not for
// room on the disk: a block is Busy if its directory is not StateOK. A kill leaves whole blocks.
func (s *Store) Put(ctx context.Context, items []pool.Item) error {
	if err := s.enter(ctx, s.puts); err != nil {
		return s.refused(err, items)
	}
	defer s.leave(s.puts)
	shares := map[*dir][]*record{}
	for i := range items {
		it := &items[i]
		if it.Status = s.prepare(it); it.Status != pool.OK {
			continue
		}
		d := s.choose(&it.Key)
		shares[d] = append(shares[d], &record{
			header: header{
				kind: block, key: it.Key, parent: it.Parent, length: uint32(len(it.Data)),
				born: uint32(s.o.Now().Unix()),
			},
			tag: s.tagOf(&it.Key), data: it.Data, item: it, result: pool.Busy,
		})
	}
	err := s.log(ctx, shares)
	for _, recs := range shares {
		for _, r := range recs {
			r.item.Status = r.outcome(pool.InProgress)
			s.count.put(r.item.Status)
		}
	}
	return err
}

// refused sets the result of a call that was not let in.
func (s *Store) refused(err error, items []pool.Item) error {
	if !errors.Is(err, errBusy) {
		return err
	}
	s.count.callsRefused.Add(1)
	for i := range items {
		items[i].Status = pool.Busy
	}
	return nil
}

// prepare returns the status of an item as far as it needs no lock.
func (s *Store) prepare(it *pool.Item) pool.Status {
	if !valid(&it.Key) || len(it.Data) == 0 || it.Parent.Len > pool.MaxHashLen {
		return pool.Invalid
	}
	if int64(len(it.Data)) > int64(s.o.WriteBytes) || recordBytes(len(it.Data)) > int64(s.o.WriteBytes) {
		s.count.tooLarge.Add(1)
		return pool.Invalid
	}
	return pool.OK
}

// log appends to the logs of several directories concurrently, and waits until all is written.
func (s *Store) log(ctx context.Context, shares map[*dir][]*record) error {
	if len(shares) == 1 {
		for d, recs := range shares {
			return d.appendAndWait(ctx, recs)
		}
	}
	var mu sync.Mutex
	var all error
	var done sync.WaitGroup
	for d, recs := range shares {
		done.Go(func() {
			if err := d.appendAndWait(ctx, recs); err != nil {
				mu.Lock()
				defer mu.Unlock()
				all = errors.Join(all, err)
			}
		})
	}
	done.Wait()
	return all
}

func (d *dir) appendAndWait(ctx context.Context, recs []*record) error {
	if err := d.append(ctx, recs); err != nil {
		return err
	}
	for _, r := range recs {
		if r.piece == nil {
			continue
		}
		select {
		case <-r.piece.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// outcome returns the status of a record; running if it is still being written.
func (r *record) outcome(running pool.Status) pool.Status {
	if r.piece == nil {
		return r.result
	}
	select {
	case <-r.piece.done:
		return r.result
	default:
		return running
	}
}

// Delete removes keys, and returns when their tombstones are on the disk. The space of what was
// deleted is freed. ErrOwed means that some keys are deleted only in memory so far.
func (s *Store) Delete(ctx context.Context, keys []pool.Key) error {
	if err := s.enter(ctx, s.puts); err != nil {
		return err
	}
	defer s.leave(s.puts)
	shares := map[*dir][]*record{}
	for i := range keys {
		if k := &keys[i]; valid(k) {
			d := s.choose(k)
			shares[d] = append(shares[d], s.tombstone(k))
		}
	}
	if err := s.log(ctx, shares); err != nil {
		return err
	}
	var err error
	for d, recs := range shares {
		for _, r := range recs {
			s.count.deletes.Add(1)
			if r.outcome(pool.Busy) != pool.OK {
				err = ErrOwed
			} else if r.had.segment != 0 {
				d.discard(r.had)
			}
		}
	}
	return err
}

func (s *Store) tombstone(k *pool.Key) *record {
	return &record{
		header: header{kind: tombstone, key: *k, born: uint32(s.o.Now().Unix())}, tag: s.tagOf(k), result: pool.Busy,
	}
}

// discard frees the space of a deleted block.
func (d *dir) discard(p place) {
	g := d.s.handles.hold(p.segment)
	if g == nil {
		return // the whole segment was dropped
	}
	g.punch(p.off(), recordBytes(int(p.length)))
	d.mu.Lock()
	if g.closed { // an open one counts in full
		if _, taken, err := g.size(); err == nil {
			d.taken += taken - g.taken
			g.taken = taken
		}
	}
	d.mu.Unlock()
	_ = g.release() // a file that is only read and has been unlinked
}
