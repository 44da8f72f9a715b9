package mooncake

import (
	"context"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// Exists implements pool.Store: OK or Missing. It does not verify the value. Mooncake keeps a value
// that exists for its master's lease time.
func (s *Store) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	for i := range keys {
		if status[i] = pool.Missing; !remote.Valid(&keys[i]) {
			status[i] = pool.Invalid
		}
	}
	return s.ask(ctx, opExists, keys, func(i int, code int64) {
		if code == 1 {
			status[i] = pool.OK
		}
	})
}

// Delete implements pool.Store.
func (s *Store) Delete(ctx context.Context, keys []pool.Key) error {
	return s.ask(ctx, opDelete, keys, func(int, int64) {})
}

// tallyDelete subtracts what was deleted: a code is the value's length.
func (s *Store) tallyDelete(codes []int64) {
	for _, code := range codes {
		if code >= 0 {
			s.stock.Add(-1, -code)
		}
	}
}

// ask sends an operation for all valid keys, at most maxKeys in a request, and calls tell with the
// code of each.
func (s *Store) ask(ctx context.Context, op operation, keys []pool.Key, tell func(i int, code int64)) error {
	for from := 0; from < len(keys); from += maxKeys {
		var names []string
		var which []int
		for i := from; i < min(from+maxKeys, len(keys)); i++ {
			if remote.Valid(&keys[i]) {
				names, which = append(names, s.name(&keys[i])), append(which, i)
			}
		}
		if len(names) == 0 {
			continue
		}
		codes, err := s.askSome(ctx, op, names)
		if err != nil {
			return err
		}
		for n, code := range codes {
			tell(which[n], code)
		}
	}
	return ctx.Err()
}

func (s *Store) askSome(ctx context.Context, op operation, names []string) ([]int64, error) {
	h, place, err := s.enter(ctx, s.questions)
	if err != nil {
		return nil, err
	}
	free := func() { s.questions <- place }
	r := &request{encode: func(id uint64) []byte { return encodeKeys(id, op, names) }, free: free}
	if op == opDelete {
		r.tally = s.tallyDelete
	}
	codes, err := s.call(ctx, h, len(names), false, r)
	if err == nil {
		free()
	}
	return codes, err
}
