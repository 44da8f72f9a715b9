package mooncake

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// errDied is the error of a call whose helper ended in the middle.
var errDied = errors.New("the helper ended")

// current is the helper.
func (s *Store) current() (*helper, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.helper == nil {
		return nil, fmt.Errorf("mooncake: %w: %w", ErrNotConnected, s.why)
	}
	return s.helper, nil
}

// enter takes a place, once there is one and a helper.
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

// call asks a helper and waits for the answer, which has n codes, as long as ctx lasts. Without an error the caller has the place back and frees it; with one
// the place is freed when the helper is done with it. inPlace: the helper works in memory of the caller, who is told by pool.InUse for how long.
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
		s.count.late.Add(1)
		return nil, &pool.InUse{Done: r.over, Err: ctx.Err()}
	}
	return nil, ctx.Err()
}

// judge checks the answer to a request, and notes whether Mooncake is there.
func (s *Store) judge(h *helper, codes []int64, n int, free func()) ([]int64, error) {
	if codes == nil {
		free()
		s.count.errors.Add(1)
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
	s.count.errors.Add(1)
	err := fmt.Errorf("mooncake: no answer, code %d", codes[0])
	s.turnOf(h, remote.Lost, err)
	return nil, err
}
