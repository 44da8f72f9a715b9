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

// run is a range of neighbouring blocks in one segment, read together by a goroutine of its own.
type run struct {
	d        *dir
	seg      *segment // held open
	off, end int64
	parts    []part

	mu      sync.Mutex // held while blocks are delivered
	givenUp bool       // nothing accesses the items any more
}

type part struct {
	item *pool.Item
	tag  tag
	place
}

// countdown waits for the parts of a call.
type countdown struct {
	left atomic.Int32
	done chan struct{} // closed when none is left
}

func newCountdown(n int) *countdown {
	c := &countdown{done: make(chan struct{})}
	c.left.Store(int32(n) + 1)
	c.finished()
	return c
}

func (c *countdown) finished() {
	if c.left.Add(-1) == 0 {
		close(c.done)
	}
}

const (
	maxRun    = 1 << 20 // bytes of neighbours that are read together
	runMemory = maxRun + 2*pageBytes
)

// Get reads items. It compares each with its key, length and checksum; on a mismatch the block is
// Corrupt, counted, and dropped. A block that moves meanwhile is Missing; one whose directory
// cannot be read is Busy.
func (s *Store) Get(ctx context.Context, items []pool.Item) (err error) {
	if err := s.enter(ctx); err != nil {
		return err
	}
	defer s.calls.Done()
	runs := s.plan(items)
	call := newCountdown(len(runs))
	for _, r := range runs {
		s.work.Go(func() { r.read(ctx, call) })
	}
	select {
	case <-call.done:
	case <-ctx.Done():
		for _, r := range runs {
			r.mu.Lock()
			r.givenUp = true
			r.mu.Unlock()
		}
	}
	for i := range items {
		if items[i].Status == pool.Busy { // not read in time
			err = ctx.Err()
		}
	}
	return err
}

// plan returns the runs of neighbours that hold the items. Those items are Busy until they are
// read; the others have their status.
func (s *Store) plan(items []pool.Item) (runs []*run) {
	parts := make([]part, 0, len(items))
	for i := range items {
		if p, ok := s.lookUp(&items[i]); ok {
			parts = append(parts, p)
		}
	}
	slices.SortFunc(parts, func(a, b part) int {
		return cmp.Or(cmp.Compare(a.segment, b.segment), cmp.Compare(a.at, b.at))
	})
	for _, p := range parts {
		end := p.off() + recordBytes(int(p.length))
		if n := len(runs); n > 0 {
			r := runs[n-1]
			if r.seg.handle == p.segment && p.off() == r.end && end-r.off <= maxRun {
				r.parts, r.end = append(r.parts, p), end
				p.item.Status = pool.Busy
				continue
			}
		}
		seg := s.handles.hold(p.segment)
		if seg == nil {
			p.item.Status = pool.Missing // it has just been evicted
			continue
		}
		p.item.Status = pool.Busy
		runs = append(runs, &run{d: s.choose(&p.item.Key), seg: seg, off: p.off(), end: end, parts: []part{p}})
	}
	return runs
}

func (s *Store) lookUp(it *pool.Item) (part, bool) {
	if !valid(&it.Key) {
		it.Status = pool.Invalid
		return part{}, false
	}
	if !s.choose(&it.Key).readable.Load() {
		it.Status = pool.Busy
		return part{}, false
	}
	p := part{item: it, tag: s.tagOf(&it.Key)}
	var ok bool
	if p.place, ok = s.index.get(p.tag); !ok {
		it.Status = pool.Missing
		return part{}, false
	}
	if int(p.length) != len(it.Data) {
		it.Status = pool.Invalid
		return part{}, false
	}
	return p, true
}

// read reads a run, to memory of the directory, so that a read that outlasts its caller writes to
// no caller's bytes, and delivers its blocks.
func (r *run) read(ctx context.Context, call *countdown) {
	defer call.finished()
	defer func() { _ = r.seg.release() }() // only read
	var b *bounce
	select {
	case b = <-r.d.buffers:
	case <-ctx.Done():
		return
	}
	defer func() { r.d.buffers <- b }()
	p, err := readSpan(r.seg, b, r.off, r.end)
	r.d.countRead(r.end-r.off, err)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.givenUp {
		return
	}
	for i := range r.parts {
		part := &r.parts[i]
		ok := err == nil && part.deliver(p[part.off()-r.off:], r.seg.nonce)
		part.item.Status = r.d.judge(part, ok)
	}
}

// Exists returns what Get would find, from memory alone.
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

// readSpan reads a part of a segment in whole pages. The bytes are b's.
func readSpan(g *segment, b *bounce, off, end int64) ([]byte, error) {
	from := off / pageBytes * pageBytes
	p, err := b.atLeast(roundUp(end, pageBytes) - from)
	if err != nil {
		return nil, err
	}
	if err := g.readAt(p, from); err != nil {
		return nil, err
	}
	return p[off-from : end-from], nil
}

// deliver copies a block to the caller; false if the key, length, place or checksum differs.
func (p *part) deliver(record []byte, nonce uint64) bool {
	var h header
	if !h.decode(record, nonce) || h.key != p.item.Key || h.off != p.off() || h.length != p.length {
		return false
	}
	return copySum(h.key.Seed(h.length), p.item.Data, record[headerBytes:][:h.length]) == h.sum
}

// judge returns the status of a block that was read. A mismatch drops it, unless it has moved.
func (d *dir) judge(p *part, ok bool) pool.Status {
	if ok {
		return pool.OK
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.s.index.removeIf(p.tag, p.place) {
		return pool.Missing
	}
	d.s.notes.note(&p.item.Key)
	d.s.add(corrupt, 1)
	return pool.Corrupt
}

// countRead detects a directory that cannot be read any more.
func (d *dir) countRead(n int64, err error) {
	if err == nil {
		d.s.add(readBytes, int(n))
		d.badReads.Store(0)
		return
	}
	d.s.add(readErrors, 1)
	if d.badReads.Add(1) < failReads {
		return
	}
	d.readable.Store(false)
	d.s.notes.noteAll()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.setState(StateFailed, err)
}
