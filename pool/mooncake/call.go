package mooncake

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// errDied is the error of a call whose helper ended before it answered.
var errDied = errors.New("the helper ended")

func (s *Store) current() (*helper, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.helper == nil {
		return nil, fmt.Errorf("mooncake: %w: %w", ErrNotConnected, s.why)
	}
	return s.helper, nil
}

// enter waits for a place, and returns it with the helper.
func (s *Store) enter(ctx context.Context, places chan int) (*helper, int, error) {
	if err := ctx.Err(); err != nil {
		return nil, 0, err
	}
	if _, err := s.current(); err != nil {
		return nil, 0, err
	}
	select {
	case place := <-places:
		h, err := s.current()
		if err != nil {
			places <- place
		}
		return h, place, err
	case <-ctx.Done():
		return nil, 0, ctx.Err()
	}
}

// call sends a request to a helper and waits for the answer of n codes until ctx ends. Without an
// error the caller frees the place; with an error the place is freed when the helper no longer
// needs it. inPlace means that the helper works in memory of the caller, which learns from
// pool.InUse for how long.
func (s *Store) call(ctx context.Context, h *helper, n int, inPlace bool, r *request) ([]int64, error) {
	if !h.submit(r) {
		r.free()
		return nil, fmt.Errorf("mooncake: %w", errDied)
	}
	select {
	case codes := <-r.answer:
		return s.judge(h, codes, n, r.free)
	case <-ctx.Done():
	}
	working, answered := h.abandon(r)
	switch {
	case answered:
		<-r.answer
		r.free()
	case working && inPlace:
		s.count[countLate].Add(1)
		return nil, &pool.InUse{Done: r.over, Err: ctx.Err()}
	}
	return nil, ctx.Err()
}

// judge checks the answer to a request, and sets the state by it.
func (s *Store) judge(h *helper, codes []int64, n int, free func()) ([]int64, error) {
	if codes == nil {
		free()
		s.count[countErrors].Add(1)
		return nil, fmt.Errorf("mooncake: %w", errDied)
	}
	if len(codes) != n {
		h.killFor(errFrame)
		free()
		return nil, errFrame
	}
	for _, c := range codes {
		if !silent(c) {
			s.answered(h)
			return codes, nil
		}
	}
	free()
	s.count[countErrors].Add(1)
	err := fmt.Errorf("mooncake: no answer, code %d", codes[0])
	s.setStateFrom(h, remote.Lost, err)
	return nil, err
}

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

// ask sends an operation for all valid keys, maxKeys at once, and calls tell with each code.
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
	codes, err := s.call(ctx, h, len(names), false, &request{
		frame: func(id uint64) any { return &keysRequest{id, op, names} }, free: free,
	})
	if err == nil {
		free()
	}
	return codes, err
}
