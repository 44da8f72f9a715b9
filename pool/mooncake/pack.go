package mooncake

import (
	"context"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// The share of a request: its headers, then the data of values that are not in the arena.
const (
	dataAt     = maxKeys * pool.ValueHeader
	valueAlign = 64
	maxValue   = 1<<32 - 1 // bytes: the header has 32 bits for it
)

func (s *Store) name(k *pool.Key) string { return remote.Name(s.o.Prefix, k) }

// packed is a request's worth of items, and where the value of each lies.
type packed struct {
	items  []*pool.Item
	places []place
	arena  bool // some lie in the arena
	taken  int  // items of the batch that it covers, those that are refused too
}

// pack takes items until there is no room in a share, or a key comes again. Status is that of what it takes; what cannot be stored is refused.
func (s *Store) pack(items []pool.Item, share int, status pool.Status) packed {
	var p packed
	seen := make(map[string]bool, min(len(items), maxKeys))
	header, data := int64(share)*s.o.share(), int64(share)*s.o.share()+dataAt
	end := int64(share+1) * s.o.share()
	for i := range items {
		it := &items[i]
		if !remote.Valid(&it.Key) || int64(len(it.Data)) > maxValue {
			it.Status = pool.Invalid
			p.taken++
			continue
		}
		at := place{key: s.name(&it.Key), area: areaArena, header: header, length: int64(len(it.Data))}
		var inside bool
		if at.offset, inside = s.o.Arena.offset(it.Data); !inside {
			at.area, at.offset = areaBounce, data
		}
		if seen[at.key] || len(p.items) == maxKeys {
			return p
		}
		if !inside && at.length > end-data {
			if at.length <= s.o.share()-dataAt {
				return p
			}
			it.Status = status
			s.count.large.Add(1)
			p.taken++
			continue
		}
		if !inside {
			data += (at.length + valueAlign - 1) &^ (valueAlign - 1)
		}
		it.Status = status
		seen[at.key] = true
		header += pool.ValueHeader
		p.taken, p.arena = p.taken+1, p.arena || inside
		p.items, p.places = append(p.items, it), append(p.places, at)
	}
	return p
}

func (s *Store) header(at *place) []byte { return s.bounce.Base[at.header:][:pool.ValueHeader] }

// copied is the bounce memory of a value that has some, else nil.
func (s *Store) copied(at *place) []byte {
	if at.area == areaArena {
		s.count.inPlace.Add(uint64(at.length))
		return nil
	}
	s.count.copied.Add(uint64(at.length))
	return s.bounce.Base[at.offset:][:at.length]
}

// batch runs a put or a get of a batch, request after request. do is called for the first items, with a share of the bounce memory that it must give back.
func (s *Store) batch(ctx context.Context, items []pool.Item, do func(h *helper, items []pool.Item, share int) (taken int, err error)) error {
	for len(items) > 0 {
		h, share, err := s.enter(ctx, s.values)
		if err != nil {
			return err
		}
		n, err := do(h, items, share)
		if err != nil {
			return err
		}
		items = items[n:]
	}
	return ctx.Err()
}
