package disk

import (
	"context"

	"github.com/kvagent/kvagent/pool"
)

// Delete removes keys, and returns when their tombstones are on the disk. The room of what was deleted goes back to the file system. ErrOwed
// says that some are deleted only in memory yet.
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
	return &record{header: header{kind: tombstone, key: *k, born: uint32(s.o.Now().Unix())}, tag: s.tagOf(k), result: pool.Busy}
}

// discard gives the room of a deleted block back.
func (d *dir) discard(p place) {
	g := d.s.handles.hold(p.segment)
	if g == nil {
		return // the whole segment went
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
