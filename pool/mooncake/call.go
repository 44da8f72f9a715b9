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

// current returns the helper.
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
