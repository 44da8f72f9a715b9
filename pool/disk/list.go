package disk

import (
	"context"

	"github.com/kvagent/kvagent/pool"
)

var _ pool.Lister = (*Store)(nil)

// List calls found for every block until found returns false. It reads the footers, and is for
// administration.
func (s *Store) List(ctx context.Context, found func(k pool.Key, bytes int64) bool) error {
	if err := s.enter(ctx, s.gets); err != nil {
		return err
	}
	defer s.leave(s.gets)
	var b bounce
	defer b.free()
	more := true
	for _, d := range s.dirs {
		for _, g := range d.held() {
			more = more && s.listSegment(ctx, d, g, &b, found)
			_ = g.release() // only read
		}
	}
	return ctx.Err()
}

func (s *Store) listSegment(
	ctx context.Context, d *dir, g *segment, b *bounce, found func(k pool.Key, bytes int64) bool,
) (more bool) {
	headers, err := d.headersOf(g, b)
	if err != nil {
		s.count.readErrors.Add(1)
		return true // its blocks are not listed
	}
	return s.listed(ctx, g, headers, found)
}

// held returns the current segments, each held open until it is released.
func (d *dir) held() (all []*segment) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, g := range d.segments {
		if g.hold() {
			all = append(all, g)
		}
	}
	return all
}

func (d *dir) headersOf(g *segment, b *bounce) ([]byte, error) {
	d.mu.Lock()
	closed, headers := g.closed, append([]byte(nil), g.headers...)
	d.mu.Unlock()
	if !closed {
		return headers, nil
	}
	c, err := readSegment(g, b)
	return c.headers, err
}

// listed returns false if no more is wanted. It skips blocks that were written again, deleted or
// evicted meanwhile.
func (s *Store) listed(ctx context.Context, g *segment, headers []byte, found func(k pool.Key, bytes int64) bool) bool {
	for p := headers; len(p) > 0; p = p[headerBytes:] {
		var h header
		if !h.decode(p, g.nonce) || h.kind != block {
			continue
		}
		at, ok := s.index.get(s.tagOf(&h.key))
		if !ok || at.segment != g.handle || at.off() != h.off {
			continue
		}
		if ctx.Err() != nil || !found(h.key, int64(h.length)) {
			return false
		}
	}
	return true
}
