package mooncake

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// Sizes of values, bytes: what copies of them begin at a multiple of, and the largest.
const (
	valueAlign = 64
	maxValue   = 1<<32 - 1
)

func (s *Store) name(k *pool.Key) string { return remote.Name(s.o.Prefix, k) }

// packed holds the items of one request, and the place of each value.
type packed struct {
	items  []*pool.Item
	places []place
	arena  bool // some values are in the arena
	taken  int  // items of the batch that it covers, including refused ones
}

// pack packs items until the share is full or a key repeats. It sets status on the packed items,
// and refuses those that cannot be stored.
func (s *Store) pack(items []pool.Item, share int, status pool.Status) packed {
	var p packed
	seen := make(map[string]bool, min(len(items), maxKeys))
	data, end := int64(share)*s.o.share(), int64(share+1)*s.o.share()
	for i := range items {
		it := &items[i]
		if !remote.Valid(&it.Key) || len(it.Data) == 0 || int64(len(it.Data)) > maxValue {
			it.Status = pool.Invalid
			p.taken++
			continue
		}
		at := place{Key: s.name(&it.Key), Area: areaArena, Length: int64(len(it.Data))}
		var inside bool
		if at.Offset, inside = s.o.Arena.offset(it.Data); !inside {
			at.Area, at.Offset = areaBounce, data
		}
		if seen[at.Key] || len(p.items) == maxKeys {
			return p
		}
		if !inside && at.Length > end-data {
			if at.Length <= s.o.share() {
				return p
			}
			it.Status = status
			s.count[countLarge].Add(1)
			p.taken++
			continue
		}
		if !inside {
			data += (at.Length + valueAlign - 1) &^ (valueAlign - 1)
		}
		it.Status = status
		seen[at.Key] = true
		p.taken, p.arena = p.taken+1, p.arena || inside
		p.items, p.places = append(p.items, it), append(p.places, at)
	}
	return p
}

// copied returns the bounce memory of a value, or nil if the value is in the arena.
func (s *Store) copied(at *place) []byte {
	if at.Area == areaArena {
		s.count[countInPlace].Add(uint64(at.Length))
		return nil
	}
	s.count[countCopied].Add(uint64(at.Length))
	return s.bounce.Base[at.Offset:][:at.Length]
}

// transfer puts or gets items, as many in each request as its share of the bounce memory has room
// for. It sets each item to status, and calls settle with the code of each one that was sent, while
// the share is still the request's.
func (s *Store) transfer(
	ctx context.Context, op operation, items []pool.Item, status pool.Status,
	settle func(h *helper, it *pool.Item, at *place, code int64),
) error {
	for len(items) > 0 {
		h, share, err := s.enter(ctx, s.values)
		if err != nil {
			return err
		}
		free := func() { s.values <- share }
		p := s.pack(items, share, status)
		items = items[p.taken:]
		if len(p.items) == 0 {
			free()
			continue
		}
		for i, it := range p.items {
			if op == opPut {
				copy(s.copied(&p.places[i]), it.Data)
			}
		}
		codes, err := s.call(ctx, h, len(p.items), p.arena, &request{
			frame: func(id uint64) any { return &transferRequest{id, op, p.places} },
			free:  free,
			tally: func(codes []int64) {
				if s.transfers.record(op, codes, time.Now()) {
					h.replaceSoon()
				}
			},
		})
		if err != nil {
			return err
		}
		for i, code := range codes {
			settle(h, p.items[i], &p.places[i], code)
		}
		free()
	}
	return ctx.Err()
}

// errNoTransfers is the reason to replace a helper that answers.
var errNoTransfers = errors.New("every transfer of its client fails, and the master answers")

// Limits of a client whose transfers fail.
const (
	failingRequests = 8                // in a row, at least
	lastFailingFor  = 10 * time.Minute // Options.FailingFor grows up to this, unless it is longer
)

// codeTransfer is the client's code for a failed transfer to or from a segment. The master has
// answered: it is asked first where the bytes are.
const codeTransfer = -800

// transfers records the outcome of a helper's transfers, to replace a helper whose transport does
// not work: Mooncake's client sometimes starts up so that it answers everything that concerns the
// master alone, but never moves a byte. A dead node looks the same until the master drops it
// (--client_ttl, 10 s), so all transfers must fail for longer than that. The time doubles with each
// helper that is replaced without a successful transfer.
type transfers struct {
	mu     sync.Mutex
	first  time.Duration // limit of the first helper
	within time.Duration // current limit
	failed int           // requests in a row, of this helper
	since  time.Time     // when the first of them was answered
}

func newTransfers(first time.Duration) *transfers { return &transfers{first: first, within: first} }

// begin resets the count for a new helper.
func (t *transfers) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failed = 0
}

// record adds the answer to a put or a get. It returns true, once for each helper, if the helper is
// to be replaced.
func (t *transfers) record(op operation, codes []int64, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	moved, failed := moves(op, codes)
	switch {
	case moved:
		t.failed, t.within = 0, t.first
		return false
	case !failed:
		return false
	}
	if t.failed++; t.failed == 1 {
		t.since = now
	}
	if t.failed < failingRequests || now.Sub(t.since) < t.within {
		return false
	}
	t.failed, t.within = 0, max(t.first, min(2*t.within, lastFailingFor))
	return true
}

// moves reports whether an answer shows transfers that succeeded and transfers that failed. A value
// that exists already, does not exist, or has no room needs no transfer.
func moves(op operation, codes []int64) (moved, failed bool) {
	for _, code := range codes {
		moved = moved || op == opPut && code == 0 || op == opGet && code > 0
		failed = failed || code == codeTransfer
	}
	return moved, failed
}
